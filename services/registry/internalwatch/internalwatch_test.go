package internalwatch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// body is the stream of a list.
type body struct {
	grpc.ServerStreamingServer[watchfanoutv1.ListChunk]
	ctx  context.Context
	data []byte
}

func (b *body) Context() context.Context { return b.ctx }

func (b *body) Send(m *watchfanoutv1.ListChunk) error {
	b.data = append(b.data, slices.Concat(m.Data...)...)
	return nil
}

// object has the fields of a list, an object or an event that the tests read.
type object struct {
	APIVersion, Kind string
	Metadata         struct{ Name, ResourceVersion string }
	Items            []object
	Type             string
	Object           *object
	Spec             json.RawMessage
}

// list returns the kind and the names of a list, and its resourceVersion.
func list(t *testing.T, fx *fixture.Fixture, r *watchfanoutv1.ListRequest) (content, version string, err error) {
	t.Helper()
	b := &body{ctx: t.Context()}
	if err := fx.InternalWatch.List(r, b); err != nil {
		return "", "", err
	}
	var l object
	if err := json.Unmarshal(b.data, &l); err != nil {
		t.Fatalf("%v: %s", err, b.data)
	}
	content = l.APIVersion + " " + l.Kind
	for _, i := range l.Items {
		content += " " + i.Metadata.Name
	}
	return content, l.Metadata.ResourceVersion, nil
}

func queryOf(resource *commonv1.Resource, namespace, labels, fields string) *watchfanoutv1.Query {
	return &watchfanoutv1.Query{
		Resource:      resource,
		Namespace:     namespace,
		LabelSelector: labels,
		FieldSelector: fields,
		Output:        &registryv1.Output{MediaType: frame.JSON},
	}
}

func as(q *watchfanoutv1.Query, kind string) *watchfanoutv1.Query {
	q.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: kind}
	return q
}

func create(t *testing.T, fx *fixture.Fixture, resource *commonv1.Resource, body string) {
	t.Helper()
	if _, err := fx.Write(t.Context(), resource, &registryv1.WriteRequest{Verb: "create", Body: []byte(body)},
		&fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
}

// scalers are read in a version other than the stored version, autoscaling/v2.
var scalers = &commonv1.Resource{Group: "autoscaling", Version: "v1", Resource: "horizontalpodautoscalers"}

const (
	scalerSpec = `"spec":{"maxReplicas":3,"scaleTargetRef":{"kind":"Deployment","name":"d","apiVersion":"apps/v1"}}`
	scaler     = `{"apiVersion":"autoscaling/v1","kind":"HorizontalPodAutoscaler","metadata":{"name":"s"},` + scalerSpec + `}`
)

// A list has the selected objects as etcd has them now. Lists that need more than the stored bytes are delegated.
func TestList(t *testing.T) {
	fx := fixture.New(t)
	maps := fixture.ConfigMaps
	for name, team := range map[string]string{"a": "one", "ab": "two", "b": "one"} {
		create(t, fx, maps, fmt.Sprintf(
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"labels":{"team":%q}}}`, name, team))
	}
	create(t, fx, scalers, scaler)
	roles := &commonv1.Resource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}
	_, version, err := list(t, fx, &watchfanoutv1.ListRequest{Query: queryOf(maps, "x", "", "")})
	if err != nil {
		t.Fatal(err)
	}
	now, _ := strconv.Atoi(version)
	const delegated = "FailedPrecondition"
	for name, c := range map[string]struct {
		query   *watchfanoutv1.Query
		options *watchfanoutv1.ListRequest
		want    string // a content, or a code
	}{
		"all":               {queryOf(maps, "x", "", ""), nil, "v1 ConfigMapList a ab b"},
		"all namespaces":    {queryOf(maps, "", "", ""), nil, "v1 ConfigMapList a ab b"},
		"another namespace": {queryOf(maps, "y", "", ""), nil, "v1 ConfigMapList"},
		"labels":            {queryOf(maps, "x", "team=one", ""), nil, "v1 ConfigMapList a b"},
		"one object":        {queryOf(maps, "x", "", "metadata.name=a"), nil, "v1 ConfigMapList a"},
		"a void limit": {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{ResourceVersion: "0", Limit: 1},
			"v1 ConfigMapList a ab b"},
		"a known revision": {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{ResourceVersion: version},
			"v1 ConfigMapList a ab b"},
		"metadata": {as(queryOf(maps, "x", "", ""), "PartialObjectMetadataList"), nil,
			"meta.k8s.io/v1 PartialObjectMetadataList a ab b"},
		"no objects":  {queryOf(roles, "", "", ""), nil, "rbac.authorization.k8s.io/v1 ClusterRoleList"},
		"a limit":     {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{Limit: 1}, delegated},
		"a next page": {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{Continue: "c"}, delegated},
		"an exact revision": {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{ResourceVersion: "5",
			ResourceVersionMatch: "Exact"}, delegated},
		"a future revision": {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{
			ResourceVersion: strconv.Itoa(now + 100)}, delegated},
		"no revision":     {queryOf(maps, "x", "", ""), &watchfanoutv1.ListRequest{ResourceVersion: "r"}, delegated},
		"a Table":         {as(queryOf(maps, "x", "", ""), "Table"), nil, delegated},
		"another version": {queryOf(scalers, "x", "", ""), nil, delegated},
		"a namespace of a cluster-scoped resource": {queryOf(roles, "x", "", ""), nil, delegated},
		"no such resource": {queryOf(&commonv1.Resource{Group: "none", Version: "v1", Resource: "nones"}, "", "", ""), nil,
			"NotFound"},
	} {
		t.Run(name, func(t *testing.T) {
			r := c.options
			if r == nil {
				r = &watchfanoutv1.ListRequest{}
			}
			r.Query = c.query
			got, _, err := list(t, fx, r)
			switch {
			case apierrors.IsNotFound(rpc.FromStatus(err)):
				got = "NotFound"
			case err != nil:
				got = status.Code(err).String()
			}
			if got != c.want {
				t.Errorf("it is %q, not %q (%v)", got, c.want, err)
			}
		})
	}
}

// An object that cannot be decoded fails the lists that select it, unless they skip such objects. It does not fail the
// list of a shorter name.
func TestAnUnreadableObject(t *testing.T) {
	fx := fixture.New(t)
	create(t, fx, fixture.ConfigMaps, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`)
	store := fx.Resources.Storage
	st, _ := store.ByName("configmaps")
	if _, err := store.Client.Client.Put(t.Context(), st.Key("x", "a-bad"), "rubbish"); err != nil {
		t.Fatal(err)
	}
	r := &watchfanoutv1.ListRequest{Query: queryOf(fixture.ConfigMaps, "x", "", "")}
	_, _, err := list(t, fx, r)
	if err = rpc.FromStatus(err); !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), `"x/a-bad"`) {
		t.Errorf("%v", err)
	}
	r.Query.SkipUnreadable = true
	if got, _, err := list(t, fx, r); got != "v1 ConfigMapList a" {
		t.Errorf("%q, %v", got, err)
	}
	r.Query = queryOf(fixture.ConfigMaps, "x", "", "metadata.name=a")
	if got, _, err := list(t, fx, r); got != "v1 ConfigMapList a" {
		t.Errorf("%q, %v", got, err)
	}
}

// frames is the stream of a watch.
type frames struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx context.Context
	c   chan *watchfanoutv1.WatchFrame
}

func (f *frames) Context() context.Context { return f.ctx }

func (f *frames) Send(m *watchfanoutv1.WatchFrame) error { f.c <- m; return nil }

// A watch sends the objects of etcd, in the requested version, then a bookmark, then the events of the log.
func TestWatch(t *testing.T) {
	fx := fixture.New(t)
	create(t, fx, scalers, scaler)
	revision, err := fx.Resources.Storage.ReadRevision(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fx.WatchCache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision - 1, Epoch: "h"})
	ctx, cancel := context.WithCancel(t.Context())
	stream, ended := &frames{ctx: ctx, c: make(chan *watchfanoutv1.WatchFrame, 100)}, make(chan error, 1)
	yes := true
	go func() {
		ended <- fx.InternalWatch.Watch(&watchfanoutv1.WatchRequest{
			Query:             queryOf(scalers, "x", "", ""),
			SendInitialEvents: &yes,
			AllowBookmarks:    true,
		}, stream)
	}()
	next := func() (all []object) {
		for len(all) == 0 {
			select {
			case m := <-stream.c:
				decoder := json.NewDecoder(strings.NewReader(string(slices.Concat(append(m.Initial, m.Data)...))))
				for decoder.More() {
					var o object
					if err := decoder.Decode(&o); err != nil {
						t.Fatal(err)
					}
					all = append(all, o)
				}
			case err := <-ended:
				t.Fatal(err)
			case <-time.After(2 * time.Minute):
				t.Fatal("nothing is received")
			}
		}
		return all
	}
	initial := next()
	if len(initial) != 2 || initial[0].Type != "ADDED" || initial[0].Object.APIVersion != "autoscaling/v1" ||
		!strings.Contains(string(initial[0].Object.Spec), `"name":"d"`) ||
		initial[1].Type != "BOOKMARK" || initial[1].Object.Metadata.ResourceVersion != fmt.Sprint(revision) {
		t.Errorf("%+v", initial)
	}
	event := func(revision int64, name string) {
		fx.WatchCache.Apply(&logv1.Event{
			Type:            logv1.Type_TYPE_ADDED,
			Revision:        revision,
			StorageResource: "horizontalpodautoscalers.autoscaling",
			Namespace:       "x",
			Name:            name,
			Epoch:           "h",
			Object: &logv1.Object{
				Json: fmt.Appendf(nil, `{"metadata":{"name":%q,"namespace":"x"},`+scalerSpec+`}`, name),
			},
		})
	}
	event(revision, "s") // the log reaches the revision of the objects
	event(revision+1, "t")
	if e := next(); len(e) != 1 || e[0].Type != "ADDED" || e[0].Object.Metadata.Name != "t" ||
		e[0].Object.APIVersion != "autoscaling/v1" {
		t.Errorf("%+v", e)
	}
	cancel() // rpc.EndOnDrain ends it between processes
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Errorf("it ends with %v", err)
	}
}
