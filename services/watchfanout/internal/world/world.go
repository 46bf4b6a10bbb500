// Package world is what the watch tier's packages are tested in: a cache that events are applied to by hand, and a
// registry that is a fake at the contract (Source).
package world

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/convert"
	"watershed.dev/services/watchfanout/log"
)

// World is a replica without its log's transport.
type World struct {
	Catalog   *discovery.Watcher
	Cache     *cache.Cache
	Log       *log.Log
	Converter *convert.Converter
	Source    registryv1.SourceClient
	Registry  *Registry
}

// Registry serves pods, of which there are three at revision 10.
type Registry struct {
	registryv1.UnimplementedSourceServer
	registryv1.UnimplementedDiscoveryServer

	// Cell is what rows have: "x" where it is nil.
	Cell atomic.Pointer[string]
}

// Pods is what the catalog says of pods.
func Pods() *registryv1.APIResource {
	pod := &commonv1.Kind{Version: "v1", Kind: "Pod"}
	return &registryv1.APIResource{
		StorageResource: "pods",
		Namespaced:      true,
		Resource:        &commonv1.Resource{Version: "v1", Resource: "pods"},
		Kind:            pod,
		StoredKind:      pod,
		ListKind:        "PodList",
	}
}

// Watch implements registryv1.CatalogServer.
func (*Registry) Watch(_ *registryv1.DiscoveryRequest, s grpc.ServerStreamingServer[registryv1.DiscoveryResponse]) error {
	if err := s.Send(&registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{Pods()}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// First is the revision at which the log begins.
const First = 10

// Snapshot implements registryv1.SourceServer.
func (*Registry) Snapshot(_ *registryv1.SnapshotRequest, s grpc.ServerStreamingServer[registryv1.SnapshotChunk]) error {
	var rows []*registryv1.Row
	for i, name := range []string{"a", "b", "c"} {
		o := Object(name, int64(First-2+i), fmt.Sprint("node-", i%2))
		rows = append(rows, &registryv1.Row{
			Namespace: "x",
			Name:      name,
			Revision:  int64(First - 2 + i),
			Labels:    o.Labels,
			Fields:    o.Fields,
			Json:      o.Json,
		})
	}
	return s.Send(&registryv1.SnapshotChunk{Revision: First, Rows: rows})
}

// Revision implements registryv1.SourceServer.
func (*Registry) Revision(context.Context, *registryv1.RevisionRequest) (*registryv1.RevisionResponse, error) {
	return &registryv1.RevisionResponse{Revision: First}, nil
}

// Encode answers rows of one cell.
func (s *Registry) Encode(_ context.Context, r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	out := &registryv1.EncodeResponse{Columns: []byte(`[{"name":"Name"}]`)}
	cell := "x"
	if p := s.Cell.Load(); p != nil {
		cell = *p
	}
	for range r.Json {
		out.Objects = append(out.Objects, fmt.Appendf(nil, `{"cells":[%q],"object":null}`, cell))
	}
	return out, nil
}

// New builds a replica that has read the log up to First.
func New(t testing.TB) *World {
	t.Helper()
	p := rpc.NewInProcess(false)
	source := &Registry{}
	registryv1.RegisterSourceServer(p, source)
	registryv1.RegisterDiscoveryServer(p, source)
	told := make(chan struct{})
	w := &World{
		Registry: source,
		Cache:    cache.New(1<<20, time.Hour),
		Source:   registryv1.NewSourceClient(p.Client("watchfanout")),
		Catalog: &discovery.Watcher{
			Registry: registryv1.NewDiscoveryClient(p.Client("watchfanout")),
			OnChange: func(*discovery.View) { close(told) },
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { w.Catalog.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	<-told
	for w.Catalog.View() == nil { // it is told of just before it is used
		runtime.Gosched()
	}
	w.Log = log.New(w.Cache, nil, w.Source, &lifecycle.Readiness{})
	w.Converter = convert.New(w.Source, w.Cache)
	w.Cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: First, Epoch: "h"})
	return w
}

// Object is a pod on a node, labelled with it.
func Object(name string, revision int64, node string) *logv1.Object {
	return &logv1.Object{
		Json:   fmt.Appendf(nil, `{"metadata":{"name":%q,"namespace":"x","resourceVersion":"%d"}}`, name, revision),
		Labels: map[string]string{"node": node},
		Fields: map[string]string{"metadata.name": name, "metadata.namespace": "x", "spec.nodeName": node},
	}
}

// Apply applies an event of a pod, whose node was before what before says; "" for no other state.
func (w *World) Apply(kind logv1.Type, revision int64, name, node, before string) {
	e := &logv1.Event{
		Type:            kind,
		Revision:        revision,
		StorageResource: "pods",
		Namespace:       "x",
		Name:            name,
		Epoch:           "h",
		Object:          Object(name, revision, node),
	}
	if before != "" {
		e.Previous = Object(name, revision, before)
	}
	w.Cache.Apply(e)
}

// Query asks for pods of namespace x in JSON.
func Query() *watchfanoutv1.Query {
	return &watchfanoutv1.Query{
		Resource:  Pods().Resource,
		Namespace: "x",
		Output:    &registryv1.Output{MediaType: "application/json"},
	}
}

// Table asks for rows of a Table.
func Table(q *watchfanoutv1.Query) *watchfanoutv1.Query {
	q.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"}
	q.IncludeObject = "None"
	return q
}
