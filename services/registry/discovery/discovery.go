// Package discovery implements the Discovery contract: a stream of the served resources, their OpenAPI documents, and
// the group versions of aggregated API servers.
//
// It does not decide which resources are served: packages installer and customresources do. Run owns the rebuilds. Each
// Watch stream runs in the goroutine of its call and reads the current response.
package discovery

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchable"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/lookup"
)

// A pause follows each rebuild, so that a thousand new CRDs do not cause a thousand rebuilds. It is rebuildPauses times
// as long as the rebuild, and maxRebuildPause at most. Discovery lists an established CRD after the pause.
const (
	rebuildPauses   = 5
	maxRebuildPause = 50 * time.Millisecond
)

// The priorities of a custom resource's group and version, as in kube-apiserver.
const (
	customGroupPriority   = 1000
	customVersionPriority = 100
)

// Discovery holds the current response and sends it, and its changes, to every watcher.
type Discovery struct {
	registryv1.UnimplementedDiscoveryServer
	resources *lookup.Resources
	// APIServices are the group versions of aggregated API servers.
	APIServices *APIServices
	// Endpoints has the addresses of gateways; nil: the kubernetes Service has none.
	Endpoints Endpoints
	// PendingStartHooks returns the start hooks that the elected registry has not completed, if they are known.
	PendingStartHooks func(context.Context) (pending []string, known bool, err error)

	dirty   chan struct{}
	current watchable.Value[*registryv1.DiscoveryResponse]
	// withoutLease counts the gateways for which a full etcd granted no lease.
	withoutLease gatewaysWithoutLease
	// making is a semaphore: it holds a value while an OpenAPI document is made. Each takes many times its size in
	// memory.
	making chan struct{}
	// hashes are the hashes of v3 documents by root path. The holder of making owns them.
	hashes map[string]documentHash
}

// New returns the discovery of the resources. It has no response before Rebuild.
func New(r *lookup.Resources) *Discovery {
	return &Discovery{
		resources: r,
		dirty:     make(chan struct{}, 1),
		making:    make(chan struct{}, 1),
		hashes:    map[string]documentHash{},
	}
}

// Invalidate schedules a rebuild.
func (d *Discovery) Invalidate() {
	select {
	case d.dirty <- struct{}{}:
	default:
	}
}

// Run rebuilds the response after Invalidate, until ctx is done.
func (d *Discovery) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.dirty:
		}
		began := time.Now()
		d.Rebuild()
		_ = lifecycle.Sleep(ctx, min(rebuildPauses*time.Since(began), maxRebuildPause))
	}
}

// Rebuild builds the current response and wakes the watchers.
func (d *Discovery) Rebuild() { d.current.Set(d.build()) }

// Watch sends the current response, then a delta after each change.
func (d *Discovery) Watch(_ *registryv1.DiscoveryRequest,
	stream grpc.ServerStreamingServer[registryv1.DiscoveryResponse]) error {
	var sent *registryv1.DiscoveryResponse
	for {
		now, changed := d.current.Get()
		if now != nil {
			m := now
			if sent != nil {
				m = delta(sent, now)
			}
			for _, part := range splitResponse(m) {
				if err := stream.Send(part); err != nil {
					return err
				}
			}
			sent = now
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// partBytes is about how many bytes of resources a message has. A cluster may have many CRDs, each with many versions,
// names and categories.
const partBytes = 4 << 20

// splitResponse splits m into messages within gRPC's limit. The messages after the first are deltas.
func splitResponse(m *registryv1.DiscoveryResponse) (out []*registryv1.DiscoveryResponse) {
	begin, bytes := 0, 0
	for i, e := range m.Resources {
		n := proto.Size(e)
		if bytes += n; bytes > partBytes && i > begin {
			out, begin, bytes = append(out, partOf(m, begin, i, len(out) == 0)), i, n
		}
	}
	if len(out) == 0 {
		return []*registryv1.DiscoveryResponse{m}
	}
	out = append(out, partOf(m, begin, len(m.Resources), false))
	for _, p := range out[:len(out)-1] {
		p.More = true
	}
	return out
}

// partOf returns m with a range of its resources. The OpenAPI hashes and the removals are in the first part.
func partOf(m *registryv1.DiscoveryResponse, begin, end int, first bool) *registryv1.DiscoveryResponse {
	p := &registryv1.DiscoveryResponse{
		Groups:      m.Groups,
		ApiServices: m.ApiServices,
		Logs:        m.Logs,
		StartHooks:  m.StartHooks,
		Resources:   m.Resources[begin:end],
		Delta:       m.Delta || !first,
	}
	if first {
		p.Openapi, p.Removed, p.OpenapiRemoved = m.Openapi, m.Removed, m.OpenapiRemoved
	}
	return p
}

// delta returns the changes from before to now. It compares resources by pointer, so a resource must not be changed
// after it was published.
func delta(before, now *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
	d := &registryv1.DiscoveryResponse{
		Delta:       true,
		Groups:      now.Groups,
		ApiServices: now.ApiServices,
		Logs:        now.Logs,
		StartHooks:  now.StartHooks,
		Openapi:     map[string]string{},
	}
	type key struct{ group, version, resource, subresource string }
	keyOf := func(r *commonv1.Resource) key { return key{r.Group, r.Version, r.Resource, r.Subresource} }
	old := make(map[key]*registryv1.APIResource, len(before.Resources))
	for _, e := range before.Resources {
		old[keyOf(e.Resource)] = e
	}
	for _, e := range now.Resources {
		k := keyOf(e.Resource)
		if old[k] != e {
			d.Resources = append(d.Resources, e)
		}
		delete(old, k)
	}
	for _, e := range old {
		d.Removed = append(d.Removed, e.Resource)
	}
	for path, hash := range now.Openapi {
		if before.Openapi[path] != hash {
			d.Openapi[path] = hash
		}
	}
	for path := range before.Openapi {
		if _, ok := now.Openapi[path]; !ok {
			d.OpenapiRemoved = append(d.OpenapiRemoved, path)
		}
	}
	return d
}

// build merges built-in resources, custom resources and APIServices.
func (d *Discovery) build() *registryv1.DiscoveryResponse {
	builtIn, crds := d.resources.BuiltIn, d.resources.Custom
	apiResources := crds.APIResources()
	out := &registryv1.DiscoveryResponse{
		Resources: slices.Concat(builtIn.APIResources(), apiResources),
		Openapi:   map[string]string{},

		StartHooks: d.resources.Storage.StartHooks(),
	}
	for _, etcd := range d.resources.Storage.Etcds()[1:] {
		out.Logs = append(out.Logs, string(etcd.Log))
	}
	var all groups
	priorities := installer.Priorities()
	for _, g := range builtIn.Groups {
		for _, v := range g.Versions {
			gv := schema.GroupVersion{Group: g.Name, Version: v}
			all.add(gv, g.GroupPriorityMinimum, priorities[gv].Version)
		}
	}
	for _, root := range builtIn.OpenAPIV3Roots() {
		out.Openapi["v3/"+root] = builtIn.OpenAPIHash()
	}
	for _, apiResource := range apiResources {
		if !apiResource.NotEstablished {
			all.add(schema.GroupVersion{
				Group:   apiResource.Resource.Group,
				Version: apiResource.Resource.Version,
			}, customGroupPriority, customVersionPriority)
		}
	}
	d.APIServices.add(out, &all)
	v2 := builtIn.OpenAPIHash()
	hashes := crds.Hashes()
	for gv, hash := range hashes {
		out.Openapi["v3"+installer.RootPath(gv)] = hash
	}
	for _, gv := range slices.SortedFunc(maps.Keys(hashes), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	}) {
		v2 += hashes[gv]
	}
	index := sha256.New()
	for _, path := range slices.Sorted(maps.Keys(out.Openapi)) {
		fmt.Fprintln(index, path, out.Openapi[path])
	}
	out.Openapi["v3"] = fmt.Sprintf("%x", index.Sum(nil))
	out.Openapi["v2"] = v2
	out.Groups = all.sorted()
	return out
}

// groups collects group versions with kube-aggregator's priorities.
type groups struct {
	byName map[string]*group
}

type group struct {
	name     string
	priority int32
	versions map[string]int32
}

func (g *groups) add(gv schema.GroupVersion, groupPriority, versionPriority int32) {
	if g.byName == nil {
		g.byName = map[string]*group{}
	}
	grp := g.byName[gv.Group]
	if grp == nil {
		grp = &group{name: gv.Group, versions: map[string]int32{}}
		g.byName[gv.Group] = grp
	}
	grp.priority = max(grp.priority, groupPriority)
	grp.versions[gv.Version] = max(grp.versions[gv.Version], versionPriority)
}

// sorted returns the groups by priority, then by name, and versions by priority, then by Kubernetes' version order
// (kube-aggregator).
func (g *groups) sorted() []*registryv1.Group {
	var all []*registryv1.Group
	for _, grp := range g.byName {
		out := &registryv1.Group{Name: grp.name, GroupPriorityMinimum: grp.priority}
		for v := range grp.versions {
			out.Versions = append(out.Versions, v)
		}
		slices.SortFunc(out.Versions, func(a, b string) int {
			return cmp.Or(cmp.Compare(grp.versions[b], grp.versions[a]), version.CompareKubeAwareVersionStrings(b, a))
		})
		all = append(all, out)
	}
	slices.SortFunc(all, func(a, b *registryv1.Group) int {
		return cmp.Or(cmp.Compare(b.GroupPriorityMinimum, a.GroupPriorityMinimum), strings.Compare(a.Name, b.Name))
	})
	return all
}
