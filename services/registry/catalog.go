package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/apis"
)

// catalogPeriod is the least time between two catalogues: where a thousand definitions come at once, not each makes a
// new one.
const catalogPeriod = 50 * time.Millisecond

// The priorities of a custom resource's group and version, kube-apiserver's.
const (
	customGroupPriority   = 1000
	customVersionPriority = 100
)

// catalogue is what is served, as the others are told.
type catalogue struct {
	make func() *registryv1.CatalogResponse

	dirty chan struct{}

	mu      sync.Mutex
	current *registryv1.CatalogResponse
	changed chan struct{}
}

func newCatalogue(make_ func() *registryv1.CatalogResponse) *catalogue {
	return &catalogue{make: make_, dirty: make(chan struct{}, 1), changed: make(chan struct{})}
}

// touch has the catalogue made anew soon.
func (c *catalogue) touch() {
	select {
	case c.dirty <- struct{}{}:
	default:
	}
}

// run makes catalogues until ctx is done.
func (c *catalogue) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.dirty:
		}
		c.renew()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(catalogPeriod):
		}
	}
}

func (c *catalogue) renew() {
	made := c.make()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = made
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *catalogue) get() (*registryv1.CatalogResponse, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current, c.changed
}

// Follow sends what is served now and whenever it changes.
func (s *Service) Follow(_ *registryv1.CatalogRequest, stream grpc.ServerStreamingServer[registryv1.CatalogResponse]) error {
	var sent *registryv1.CatalogResponse
	for {
		c, changed := s.catalogue.get()
		if c != nil {
			m := c
			if sent != nil {
				m = delta(sent, c)
			}
			if err := stream.Send(m); err != nil {
				return err
			}
			sent = c
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// delta is what makes now out of before. Entries do not change, so that those that are the same are so by identity.
func delta(before, now *registryv1.CatalogResponse) *registryv1.CatalogResponse {
	d := &registryv1.CatalogResponse{Delta: true, Groups: now.Groups, Remotes: now.Remotes, Openapi: map[string]string{}}
	type key struct{ group, version, resource, subresource string }
	of := func(r *commonv1.Resource) key { return key{r.Group, r.Version, r.Resource, r.Subresource} }
	old := make(map[key]*registryv1.ResourceEntry, len(before.Resources))
	for _, e := range before.Resources {
		old[of(e.Resource)] = e
	}
	for _, e := range now.Resources {
		k := of(e.Resource)
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

// makeCatalog puts together what is built in, what definitions define and what other servers answer for.
func (s *Service) makeCatalog() *registryv1.CatalogResponse {
	customs := s.customs.Entries()
	c := &registryv1.CatalogResponse{Resources: slices.Concat(s.set.Entries(), customs), Openapi: map[string]string{}}
	var all groups
	priorities := apis.Priorities()
	for _, g := range s.set.Groups {
		for _, v := range g.Versions {
			gv := schema.GroupVersion{Group: g.Name, Version: v}
			all.add(gv, g.GroupPriorityMinimum, priorities[gv].Version)
			c.Openapi[documentPath(gv)] = s.set.OpenAPIHash()
		}
	}
	for _, e := range customs {
		if !e.Hidden {
			all.add(schema.GroupVersion{Group: e.Resource.Group, Version: e.Resource.Version}, customGroupPriority, customVersionPriority)
		}
	}
	s.remotes.add(c, &all)
	v2 := s.set.OpenAPIHash()
	hashes := s.customs.Hashes()
	for gv, hash := range hashes {
		c.Openapi[documentPath(gv)] = hash
	}
	for _, gv := range slices.SortedFunc(maps.Keys(hashes), func(a, b schema.GroupVersion) int { return strings.Compare(a.String(), b.String()) }) {
		v2 += hashes[gv]
	}
	c.Openapi["v2"] = v2
	c.Groups = all.sorted()
	return c
}

// documentPath is where a group version's OpenAPI document is found, below /openapi/.
func documentPath(gv schema.GroupVersion) string { return "v3" + apis.RootPath(gv) }

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
	of := g.byName[gv.Group]
	if of == nil {
		of = &group{name: gv.Group, versions: map[string]int32{}}
		g.byName[gv.Group] = of
	}
	of.priority = max(of.priority, groupPriority)
	of.versions[gv.Version] = max(of.versions[gv.Version], versionPriority)
}

// sorted orders groups and versions as kube-aggregator does: by priority, groups then by name and versions as
// Kubernetes counts.
func (g *groups) sorted() []*registryv1.Group {
	var all []*registryv1.Group
	for _, of := range g.byName {
		out := &registryv1.Group{Name: of.name, GroupPriorityMinimum: of.priority}
		for v := range of.versions {
			out.Versions = append(out.Versions, v)
		}
		slices.SortFunc(out.Versions, func(a, b string) int {
			return cmp.Or(cmp.Compare(of.versions[b], of.versions[a]), version.CompareKubeAwareVersionStrings(b, a))
		})
		all = append(all, out)
	}
	slices.SortFunc(all, func(a, b *registryv1.Group) int {
		return cmp.Or(cmp.Compare(b.GroupPriorityMinimum, a.GroupPriorityMinimum), strings.Compare(a.Name, b.Name))
	})
	return all
}

// OpenAPI sends one document in JSON.
func (s *Service) OpenAPI(r *registryv1.OpenAPIRequest, stream grpc.ServerStreamingServer[registryv1.OpenAPIChunk]) error {
	doc, err := s.document(r.Path)
	if err != nil {
		return rpc.ToStatus(apierrors.NewInternalError(err))
	}
	if doc == nil {
		return rpc.ToStatus(apierrors.NewGenericServerResponse(404, "", schemaResource(nil), "", "404 page not found", 0, true))
	}
	data, err := json.Marshal(doc)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return inChunks(data, func(b []byte) error { return stream.Send(&registryv1.OpenAPIChunk{Data: b}) })
}

func (s *Service) document(path string) (any, error) {
	doc, ok, err := s.set.OpenAPI(path)
	switch {
	case err != nil:
		return nil, err
	case path == "v2":
		builtIn, ok := doc.(*spec.Swagger)
		if !ok {
			return nil, fmt.Errorf("the document of v2 is a %T", doc)
		}
		return s.customs.OpenAPIV2(builtIn)
	case ok:
		return doc, nil
	}
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(path, "v3/apis/"))
	if err != nil {
		return nil, nil
	}
	v3, err := s.customs.OpenAPIV3(gv)
	if v3 == nil {
		return nil, err
	}
	return v3, err
}
