// Package discovery watches the registry's list of served resources: their versions, and how each resource is served.
//
// The package does not serve discovery documents; the gateway does. The goroutine that calls Run replaces the view. Any
// goroutine may read a view, because a view never changes.
package discovery

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchable"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// View is an immutable snapshot of the served resources.
type View struct {
	*registryv1.DiscoveryResponse
	resources map[resourceKey]*registryv1.APIResource
	builtIn   map[string]bool
}

type resourceKey struct{ group, version, resource, subresource string }

// APIResource returns the entry of a resource or subresource.
func (v *View) APIResource(group, version, resource, subresource string) (*registryv1.APIResource, bool) {
	e, ok := v.resources[resourceKey{group, version, resource, subresource}]
	return e, ok
}

// BuiltIn returns true if a group has a resource that is not a custom resource.
func (v *View) BuiltIn(group string) bool { return v.builtIn[group] }

// Watcher watches the registry's Discovery stream.
type Watcher struct {
	Registry registryv1.DiscoveryClient
	// OnChange, if set, is called with each new view, before View returns it.
	OnChange func(*View)
	// AfterChange, if set, is called with each new view, once View returns it.
	AfterChange func(*View)

	current watchable.Value[*View]
}

// View returns the newest view, or nil before the first.
func (c *Watcher) View() *View {
	v, _ := c.current.Get()
	return v
}

// Serves returns true if View has a resource. It is not called before the first view.
func (c *Watcher) Serves(r *commonv1.Resource) bool {
	_, ok := c.View().APIResource(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())
	return ok
}

// AwaitCRD waits until View has the CRD of a resource at an etcd revision or later, or lacks the resource, or until ctx
// is done. It is not called before the first view.
func (c *Watcher) AwaitCRD(ctx context.Context, r *commonv1.Resource, revision int64) {
	for {
		v, changed := c.current.Get()
		e, ok := v.APIResource(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())
		if !ok || e.CrdRevision >= revision {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// watchPause is the delay before a new stream after one ended.
const watchPause = 200 * time.Millisecond

// Run watches until ctx is done. While no registry responds, View returns the last view.
func (c *Watcher) Run(ctx context.Context) {
	open := func(ctx context.Context) (grpc.ServerStreamingClient[registryv1.DiscoveryResponse], error) {
		return c.Registry.Watch(ctx, &registryv1.DiscoveryRequest{})
	}
	var full *registryv1.DiscoveryResponse
	rpc.RetryWatch(ctx, watchPause, open, func(m *registryv1.DiscoveryResponse, first bool) {
		if first {
			full = nil
		}
		if m.Delta {
			m = mergeDelta(full, m)
		}
		if full = m; !m.More {
			c.set(m)
		}
	}, func(err error) { slog.Debug("The discovery stream ended", "error", err) })
}

// mergeDelta returns full with the changes of delta. It changes neither argument.
func mergeDelta(full, delta *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
	out := &registryv1.DiscoveryResponse{
		Groups:      delta.Groups,
		ApiServices: delta.ApiServices,
		Logs:        delta.Logs,
		StartHooks:  delta.StartHooks,
		More:        delta.More,
		Openapi:     maps.Clone(full.GetOpenapi()),
	}
	removed, changed := map[resourceKey]bool{}, map[resourceKey]*registryv1.APIResource{}
	for _, r := range delta.Removed {
		removed[keyOf(r)] = true
	}
	for _, e := range delta.Resources {
		changed[keyOf(e.Resource)] = e
	}
	for _, e := range full.GetResources() {
		k := keyOf(e.Resource)
		if removed[k] {
			continue
		}
		if newer := changed[k]; newer != nil {
			e = newer
			delete(changed, k)
		}
		out.Resources = append(out.Resources, e)
	}
	for _, e := range delta.Resources {
		if changed[keyOf(e.Resource)] != nil {
			out.Resources = append(out.Resources, e)
		}
	}
	// Custom resources have the order of a full response, independent of the order of their creation.
	slices.SortStableFunc(out.Resources, func(a, b *registryv1.APIResource) int {
		if !a.Unstructured || !b.Unstructured {
			return cmp.Compare(afterBuiltIn(a), afterBuiltIn(b))
		}
		return cmp.Or(strings.Compare(a.Resource.Group, b.Resource.Group),
			strings.Compare(a.Resource.Resource, b.Resource.Resource))
	})
	if out.Openapi == nil {
		out.Openapi = map[string]string{}
	}
	maps.Copy(out.Openapi, delta.Openapi)
	for _, path := range delta.OpenapiRemoved {
		delete(out.Openapi, path)
	}
	return out
}

// afterBuiltIn orders custom resources after built-in resources.
func afterBuiltIn(e *registryv1.APIResource) int {
	if e.Unstructured {
		return 1
	}
	return 0
}

func keyOf(r *commonv1.Resource) resourceKey {
	return resourceKey{r.Group, r.Version, r.Resource, r.Subresource}
}

// NewView returns the view of a full response.
func NewView(m *registryv1.DiscoveryResponse) *View {
	v := &View{m, map[resourceKey]*registryv1.APIResource{}, map[string]bool{}}
	for _, e := range m.Resources {
		if !e.Unstructured {
			v.builtIn[e.Resource.Group] = true
		}
		v.resources[keyOf(e.Resource)] = e
	}
	return v
}

func (c *Watcher) set(m *registryv1.DiscoveryResponse) {
	if old := c.View(); old != nil && equal(old.DiscoveryResponse, m) {
		return // another replica sent the same resources
	}
	v := NewView(m)
	if c.OnChange != nil {
		c.OnChange(v)
	}
	c.current.Set(v)
	if c.AfterChange != nil {
		c.AfterChange(v)
	}
}

// equal returns true if both responses are equal. It does not compare an entry with itself: a delta changes a few of
// thousands of entries.
func equal(a, b *registryv1.DiscoveryResponse) bool {
	return slices.EqualFunc(a.Resources, b.Resources, func(a, b *registryv1.APIResource) bool {
		return a == b || proto.Equal(a, b)
	}) && proto.Equal(withoutResources(a), withoutResources(b))
}

// withoutResources returns a shallow copy of m without its resources.
func withoutResources(m *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
	out := &registryv1.DiscoveryResponse{}
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Name() != "resources" {
			out.ProtoReflect().Set(f, v)
		}
		return true
	})
	return out
}
