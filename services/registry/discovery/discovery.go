// Package catalog tells the others what is served: every resource, and which group versions other servers answer for.
package discovery

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"

	"watershed.dev/platform/watchable"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/lookup"
)

// rebuildPeriod is the least time between two catalogs: where a thousand definitions come at once, not each makes a
// new one.
const rebuildPeriod = 50 * time.Millisecond

// The priorities of a custom resource's group and version, kube-apiserver's.
const (
	customGroupPriority   = 1000
	customVersionPriority = 100
)

// Discovery tells what is served, and whenever that changes.
type Discovery struct {
	registryv1.UnimplementedDiscoveryServer
	resources *lookup.Resources
	// APIServices are the group versions that other servers answer for.
	APIServices *APIServices

	dirty   chan struct{}
	current watchable.Value[*registryv1.DiscoveryResponse]
	// making holds a value while a document of OpenAPI is made: each takes many times its size in memory.
	making chan struct{}
}

// New returns the catalog of what is served. It is empty until Renew.
func New(r *lookup.Resources) *Discovery {
	return &Discovery{resources: r, dirty: make(chan struct{}, 1), making: make(chan struct{}, 1)}
}

// Invalidate has the catalog made anew soon.
func (d *Discovery) Invalidate() {
	select {
	case d.dirty <- struct{}{}:
	default:
	}
}

// Run makes catalogs until ctx is done.
func (d *Discovery) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.dirty:
		}
		d.Rebuild()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rebuildPeriod):
		}
	}
}

// Rebuild makes the catalog anew.
func (d *Discovery) Rebuild() { d.current.Set(d.build()) }

// Watch sends what is served now and whenever it changes.
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

// partBytes is about how many bytes of entries one message has: CRDs may be many, and each have many versions, names
// and categories.
const partBytes = 4 << 20

// splitResponse are m in messages that are within gRPC's bound: those after the first are deltas.
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

// partOf is m with some of its entries. What is not an entry comes with the first.
func partOf(m *registryv1.DiscoveryResponse, begin, end int, first bool) *registryv1.DiscoveryResponse {
	p := &registryv1.DiscoveryResponse{
		Groups:      m.Groups,
		ApiServices: m.ApiServices,
		Resources:   m.Resources[begin:end],
		Delta:       m.Delta || !first,
	}
	if first {
		p.Openapi, p.Removed, p.OpenapiRemoved = m.Openapi, m.Removed, m.OpenapiRemoved
	}
	return p
}

// delta is what makes now out of before. Entries do not change, so that those that are the same are so by identity.
func delta(before, now *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
	d := &registryv1.DiscoveryResponse{
		Delta:       true,
		Groups:      now.Groups,
		ApiServices: now.ApiServices,
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

// build puts together what is built in, what definitions define and what other servers answer for.
func (d *Discovery) build() *registryv1.DiscoveryResponse {
	builtIn, crds := d.resources.BuiltIn, d.resources.Custom
	apiResources := crds.APIResources()
	out := &registryv1.DiscoveryResponse{
		Resources: slices.Concat(builtIn.APIResources(), apiResources),
		Openapi:   map[string]string{},
	}
	var all groups
	priorities := installer.Priorities()
	for _, g := range builtIn.Groups {
		for _, v := range g.Versions {
			gv := schema.GroupVersion{Group: g.Name, Version: v}
			all.add(gv, g.GroupPriorityMinimum, priorities[gv].Version)
			out.Openapi[documentPath(gv)] = builtIn.OpenAPIHash()
		}
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
		out.Openapi[documentPath(gv)] = hash
	}
	for _, gv := range slices.SortedFunc(maps.Keys(hashes), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	}) {
		v2 += hashes[gv]
	}
	out.Openapi["v2"] = v2
	out.Groups = all.sorted()
	return out
}

// documentPath is where a group version's OpenAPI document is found, below /openapi/.
func documentPath(gv schema.GroupVersion) string { return "v3" + installer.RootPath(gv) }

// groups gathers group versions with kube-aggregator's priorities.
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

// sorted orders groups and versions as kube-aggregator does: by priority, groups then by name and versions as
// Kubernetes counts.
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
