// Package routing finds who answers a request and carries it there: reads of stored resources to the watch tier, all
// else to registry, with admission and authorization asked for on registry's behalf.
package routing

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// View is what is served, at one moment. It does not change.
type View struct {
	*registryv1.CatalogResponse
	entries map[entryKey]*registryv1.ResourceEntry
	builtIn map[string]bool
}

type entryKey struct{ group, version, resource, subresource string }

// Entry finds a resource or subresource.
func (v *View) Entry(group, version, resource, subresource string) (*registryv1.ResourceEntry, bool) {
	e, ok := v.entries[entryKey{group, version, resource, subresource}]
	return e, ok
}

// BuiltIn says whether a group is served in any version by Go's own types.
func (v *View) BuiltIn(group string) bool { return v.builtIn[group] }

// Catalog follows registry's catalogue.
type Catalog struct {
	Registry registryv1.RegistryClient
	// Changed is called with every new view, before it is used.
	Changed func(*View)

	current atomic.Pointer[View]
}

// View is the newest view; nil before the first.
func (c *Catalog) View() *View { return c.current.Load() }

// Run follows until ctx is done. While no registry answers, the last view stays.
func (c *Catalog) Run(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := c.Registry.Catalog(ctx, &registryv1.CatalogRequest{})
		for err == nil {
			var m *registryv1.CatalogResponse
			if m, err = stream.Recv(); err == nil {
				c.set(m)
			}
		}
		if ctx.Err() == nil {
			slog.Debug("The catalogue broke off", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (c *Catalog) set(m *registryv1.CatalogResponse) {
	if old := c.View(); old != nil && proto.Equal(old.CatalogResponse, m) {
		return // the same, from another replica
	}
	v := &View{m, map[entryKey]*registryv1.ResourceEntry{}, map[string]bool{}}
	for _, e := range m.Resources {
		if !e.Untyped {
			v.builtIn[e.Resource.Group] = true
		}
		v.entries[entryKey{e.Resource.Group, e.Resource.Version, e.Resource.Resource, e.Resource.Subresource}] = e
	}
	if c.Changed != nil {
		c.Changed(v)
	}
	c.current.Store(v)
}
