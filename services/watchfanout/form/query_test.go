package form

import (
	"errors"
	"testing"

	"watershed.dev/platform/catalog"
	"watershed.dev/platform/frame"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A query is answered by an entry that is the caller's or a newer one, and never beyond the namespace that the caller's
// permission is for.
func TestByWhichEntryAQueryIsAnswered(t *testing.T) {
	widgets := &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
	entry := func(namespaced bool) *catalog.View {
		return catalog.NewView(&registryv1.CatalogResponse{Resources: []*registryv1.ResourceEntry{{
			Resource:   widgets,
			Kind:       &commonv1.Kind{Group: "example.com", Version: "v1", Kind: "Widget"},
			StoredAs:   "widgets.example.com",
			Namespaced: namespaced,
			DefinedAt:  10,
			Digest:     7,
		}}})
	}
	for name, c := range map[string]struct {
		view      *catalog.View
		resource  *commonv1.Resource
		at        int64
		digest    uint64
		namespace string
		known     bool
	}{
		"the same":                              {entry(true), widgets, 10, 7, "x", true},
		"a newer one":                           {entry(true), widgets, 9, 6, "x", true},
		"an older one that says the same":       {entry(true), widgets, 11, 7, "x", true},
		"an older one that says something else": {entry(true), widgets, 11, 8, "x", false},
		"of all namespaces":                     {entry(true), widgets, 10, 7, "", true},
		"a newer one that has no namespaces":    {entry(false), widgets, 9, 6, "x", false},
		"one that has none, of a cluster's":     {entry(false), widgets, 10, 7, "", true},
		"none":                                  {entry(true), &commonv1.Resource{Resource: "pods"}, 0, 0, "", false},
		"no resource, as of an older gateway":   {entry(true), nil, 0, 0, "", false},
		"nothing, before the catalog is told":   {nil, widgets, 10, 7, "", false},
	} {
		q, err := Read(c.view, &watchfanoutv1.Query{
			Resource:  c.resource,
			DefinedAt: c.at,
			Digest:    c.digest,
			Namespace: c.namespace,
			Output:    &registryv1.Output{MediaType: frame.JSON},
		})
		if c.known != (err == nil) || !c.known && !errors.Is(err, ErrNotInCatalog) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && q.Namespace != c.namespace {
			t.Errorf("%s: namespace %q", name, q.Namespace)
		}
	}
}
