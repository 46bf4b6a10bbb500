package discovery

import (
	"context"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/proto"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func entry(resource, singular string) *registryv1.APIResource {
	return &registryv1.APIResource{
		Resource: &commonv1.Resource{Group: "g", Version: "v1", Resource: resource},
		Singular: singular,
	}
}

func TestDeltasAreMerged(t *testing.T) {
	full := &registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{entry("a", "1"), entry("b", "1"), entry("c", "1")},
		Openapi:   map[string]string{"v2": "x", "v3/a": "y"},
	}
	before := proto.Clone(full)
	got := mergeDelta(full, &registryv1.DiscoveryResponse{
		Delta:          true,
		Resources:      []*registryv1.APIResource{entry("d", "1"), entry("b", "2")},
		Removed:        []*commonv1.Resource{entry("a", "").Resource},
		Openapi:        map[string]string{"v2": "z"},
		OpenapiRemoved: []string{"v3/a"},
	})
	want := &registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{entry("b", "2"), entry("c", "1"), entry("d", "1")},
		Openapi:   map[string]string{"v2": "z"},
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if !proto.Equal(full, before) {
		t.Error("the catalog before was changed")
	}
}

// Discovery sorts a group's resources by name, as kube-apiserver does, independent of the order of their creation.
func TestCustomResourcesAreSortedByName(t *testing.T) {
	builtIn, widgets, globals := entry("z", "1"), entry("widgets", "1"), entry("globals", "1")
	widgets.Unstructured, globals.Unstructured = true, true
	got := mergeDelta(&registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{builtIn, widgets}},
		&registryv1.DiscoveryResponse{
			Delta:     true,
			Resources: []*registryv1.APIResource{globals},
		})
	want := &registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{builtIn, globals, widgets},
		Openapi:   map[string]string{},
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

// Responses differ if an entry, or any other field, differs.
func TestResponsesAreCompared(t *testing.T) {
	entry := func(verbs ...string) *registryv1.APIResource {
		return &registryv1.APIResource{Resource: &commonv1.Resource{Resource: "widgets"}, Verbs: verbs}
	}
	of := func(e *registryv1.APIResource, openapi string) *registryv1.DiscoveryResponse {
		return &registryv1.DiscoveryResponse{
			Resources: []*registryv1.APIResource{e},
			Openapi:   map[string]string{"v2": openapi},
		}
	}
	first := entry("get")
	for name, c := range map[string]struct {
		b     *registryv1.DiscoveryResponse
		equal bool
	}{
		"same entry":     {of(first, "1"), true},
		"equal entry":    {of(entry("get"), "1"), true},
		"other entry":    {of(entry("list"), "1"), false},
		"other document": {of(first, "2"), false},
		"no entry":       {&registryv1.DiscoveryResponse{Openapi: map[string]string{"v2": "1"}}, false},
	} {
		if equal(of(first, "1"), c.b) != c.equal {
			t.Errorf("%s: equal is %v", name, !c.equal)
		}
	}
}

// AwaitCRD returns once the view has the CRD as of the revision, or lacks it, and when its context ends.
func TestAwaitCRD(t *testing.T) {
	at := func(revision int64) *registryv1.DiscoveryResponse {
		e := entry("a", "")
		e.CrdRevision = revision
		return &registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{e}}
	}
	for name, next := range map[string]*registryv1.DiscoveryResponse{"changed": at(7), "deleted": {}, "none": nil} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w := &Watcher{}
			w.set(at(5))
			returned := make(chan struct{})
			go func() { defer close(returned); w.AwaitCRD(ctx, entry("a", "").Resource, 7) }()
			w.set(at(6))
			synctest.Wait()
			select {
			case <-returned:
				t.Errorf("%s: returned with the CRD as of revision 6", name)
			default:
			}
			if next == nil {
				cancel()
			} else {
				w.set(next)
			}
			<-returned
		})
	}
}
