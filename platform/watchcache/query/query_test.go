package query

import (
	"errors"
	"strings"
	"testing"
	"unsafe"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A query resolves with the caller's discovery entry or a newer one. It never exceeds the namespace of the caller's
// permission.
func TestAQueryIsResolvedByDiscovery(t *testing.T) {
	widgets := &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
	entry := func(namespaced bool) *discovery.View {
		return discovery.NewView(&registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{{
			Resource:        widgets,
			Kind:            &commonv1.Kind{Group: "example.com", Version: "v1", Kind: "Widget"},
			StorageResource: "widgets.example.com",
			Namespaced:      namespaced,
			CrdRevision:     10,
			Digest:          7,
		}}})
	}
	for name, c := range map[string]struct {
		view      *discovery.View
		resource  *commonv1.Resource
		at        int64
		digest    uint64
		namespace string
		known     bool
	}{
		"the same":                            {entry(true), widgets, 10, 7, "x", true},
		"a newer one":                         {entry(true), widgets, 9, 6, "x", true},
		"an older one with the same digest":   {entry(true), widgets, 11, 7, "x", true},
		"an older one with another digest":    {entry(true), widgets, 11, 8, "x", false},
		"of all namespaces":                   {entry(true), widgets, 10, 7, "", true},
		"a newer one that has no namespaces":  {entry(false), widgets, 9, 6, "x", false},
		"one that has none, of a cluster's":   {entry(false), widgets, 10, 7, "", true},
		"none":                                {entry(true), &commonv1.Resource{Resource: "pods"}, 0, 0, "", false},
		"no resource, as of an older gateway": {entry(true), nil, 0, 0, "", false},
		"nothing, before the first response":  {nil, widgets, 10, 7, "", false},
	} {
		q, err := Resolve(c.view, &watchfanoutv1.Query{
			Resource:    c.resource,
			CrdRevision: c.at,
			Digest:      c.digest,
			Namespace:   c.namespace,
			Output:      &registryv1.Output{MediaType: frame.JSON},
		})
		if c.known != (err == nil) || !c.known && !errors.Is(err, ErrNotDiscovered) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && q.Namespace != c.namespace {
			t.Errorf("%s: namespace %q", name, q.Namespace)
		}
	}
}

func pods(t *testing.T, change func(*registryv1.APIResource, *watchfanoutv1.Query)) *Query {
	t.Helper()
	pod := &commonv1.Kind{Version: "v1", Kind: "Pod"}
	e := &registryv1.APIResource{
		StorageResource: "pods",
		Namespaced:      true,
		Resource:        &commonv1.Resource{Version: "v1", Resource: "pods"},
		Kind:            pod,
		StoredKind:      pod,
		ListKind:        "PodList",
	}
	p := &watchfanoutv1.Query{Namespace: "x", Output: &registryv1.Output{MediaType: frame.JSON}}
	if change != nil {
		change(e, p)
	}
	q, err := New(e, p)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// A trigger is the smallest part of a resource's events that includes everything that the query selects.
func TestTriggers(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*registryv1.APIResource, *watchfanoutv1.Query)
		want   cache.Trigger
	}{
		"of a namespace": {nil, cache.Trigger{Field: cache.ByNamespace, Value: "x"}},
		"of everything": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.Namespace = ""
		}, cache.Trigger{}},
		"of one object": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.FieldSelector = "metadata.name=a"
		}, cache.Trigger{Field: cache.ByKey, Value: "x/a"}},
		"of a name in all namespaces": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.Namespace, p.FieldSelector = "", "metadata.name=a"
		}, cache.Trigger{}},
		"of a field": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.FieldSelector = "spec.nodeName=n,status.phase!=Failed"
		}, cache.Trigger{Field: "spec.nodeName", Value: "n"}},
		"of another field than one": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.FieldSelector = "spec.nodeName!=n"
		}, cache.Trigger{Field: cache.ByNamespace, Value: "x"}},
		"of an empty field": {func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
			p.FieldSelector = "spec.nodeName="
		}, cache.Trigger{Field: cache.ByNamespace, Value: "x"}},
		"of a field that only converting tells": {func(e *registryv1.APIResource, p *watchfanoutv1.Query) {
			e.ConvertedFields, p.FieldSelector = true, "spec.color=red"
		}, cache.Trigger{Field: cache.ByNamespace, Value: "x"}},
	} {
		if got := pods(t, c.change).Trigger(); got != c.want {
			t.Errorf("%s: %+v, not %+v", name, got, c.want)
		}
	}
}

// A query's native bytes are the stored bytes in the requested version and encoding.
func TestNativeBytes(t *testing.T) {
	item := &cache.Item{Version: "v1"}
	for name, c := range map[string]struct {
		change func(*registryv1.APIResource, *watchfanoutv1.Query)
		own    bool
	}{
		"the stored kind": {nil, true},
		"another version": {func(e *registryv1.APIResource, _ *watchfanoutv1.Query) {
			e.StoredKind = &commonv1.Kind{Version: "v2", Kind: "Pod"}
		}, false},
		"metadata of another version": {func(e *registryv1.APIResource, p *watchfanoutv1.Query) {
			e.StoredKind = &commonv1.Kind{Version: "v2", Kind: "Pod"}
			p.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadata"}
		}, true},
		"a custom resource in the object's version": {func(e *registryv1.APIResource, _ *watchfanoutv1.Query) {
			e.Unstructured, e.StoredKind = true, &commonv1.Kind{Version: "v2", Kind: "Pod"}
		}, true},
		"a custom resource in another": {func(e *registryv1.APIResource, _ *watchfanoutv1.Query) {
			e.Unstructured, e.Kind = true, &commonv1.Kind{Version: "v2", Kind: "Pod"}
		}, false},
	} {
		if got := pods(t, c.change).IsNative(item); got != c.own {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Metadata is native in every version, but fields are not. Only the conversion decides if a field matches, unless the
// object is stored in the requested version.
func TestFieldsOfMetadata(t *testing.T) {
	for _, kind := range []string{"", "PartialObjectMetadata"} {
		q := pods(t, func(e *registryv1.APIResource, p *watchfanoutv1.Query) {
			e.Unstructured, e.ConvertedFields = true, true
			e.StoredKind = &commonv1.Kind{Version: "v2", Kind: "Pod"}
			p.FieldSelector = "spec.color=red"
			p.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: kind}
		})
		for version, may := range map[string]bool{"v1": false, "v2": true} {
			blue := map[string]string{"spec.color": "blue"}
			i := cache.ItemOf(&registryv1.Row{Namespace: "x", Name: "a", Version: version, Fields: blue})
			if q.MayMatch(i) != may || q.NeedsConvertedFields(i) != may {
				t.Errorf("%q, stored in %s: it may match: %v", kind, version, !may)
			}
		}
	}
}

// Metadata of a DaemonSet lacks the annotation of the conversion to apps/v1. A DaemonSet itself, and metadata of other
// objects, have it.
func TestMetadataOfDaemonSets(t *testing.T) {
	const metadata = `{"metadata":{"name":"a"`
	const annotated = metadata + `,"annotations":{"deprecated.daemonset.template.generation":"1"}}`
	item := cache.ItemOf(&registryv1.Row{Json: []byte(annotated + `,"spec":{}}`)})
	for resource, want := range map[string]string{"daemonsets.apps": metadata + "}", "deployments.apps": annotated} {
		q := pods(t, func(e *registryv1.APIResource, _ *watchfanoutv1.Query) { e.StorageResource = resource })
		if got, err := q.ThroughMetadata(item); err != nil || string(got) != want {
			t.Errorf("%s: %s, %v", resource, got, err)
		}
	}
}

// A row's object is inserted from the stored bytes, and its columns are sent once.
func TestRows(t *testing.T) {
	q := pods(t, func(_ *registryv1.APIResource, p *watchfanoutv1.Query) {
		p.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"}
	})
	encoded := []byte(`{"cells":["a"],"object":null}`)
	head, err := q.RowHead(encoded)
	row := append(append(head, `"metadata":{"name":"a"}`...), q.RowTail()...)
	if want := `{"cells":["a"],"object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1",` +
		`"metadata":{"name":"a"}}}`; err != nil || string(row) != want {
		t.Errorf("%s, %v", row, err)
	}
	if string(encoded) != `{"cells":["a"],"object":null}` {
		t.Errorf("what registry made is %s now", encoded)
	}
	if _, err := q.RowHead([]byte(`{"cells":["a"]}`)); err == nil {
		t.Error("a row without an object is taken")
	}
	q.IncludeObject = "None"
	if head, err := q.RowHead(encoded); err != nil || string(head) != string(encoded) || q.RowTail() != nil {
		t.Errorf("a row that includes nothing: %s, %v", head, err)
	}
	q.IncludeObject = ""
	first, next := q.Row("ADDED", 7, row, []byte(`[{"name":"Name"}]`)), q.Row("ADDED", 8, row, nil)
	if !strings.Contains(string(first), `"resourceVersion":"7"},"columnDefinitions":[{"name":"Name"}]`) ||
		!strings.Contains(string(next), `"resourceVersion":"8"},"columnDefinitions":null`) {
		t.Errorf("%s%s", first, next)
	}
	bookmark := q.Bookmark(9, true)
	if !strings.HasPrefix(string(bookmark), `{"type":"BOOKMARK"`) || !strings.Contains(string(bookmark),
		`"k8s.io/initial-events-end":"true"`) {
		t.Errorf("%s", bookmark)
	}
	for _, x := range []struct {
		include    string
		initialEnd bool
		object     string
	}{
		{"Object", false, `{"kind":"Pod","apiVersion":"v1",`},
		{"Object", true, `{"kind":"Pod","apiVersion":"v1",`},
		{"Metadata", false, `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1",`},
		{"None", false, `null}]}`},
		{"None", true, `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1",`},
	} {
		q.IncludeObject = x.include
		if b := q.Bookmark(9, x.initialEnd); !strings.Contains(string(b), `"rows":[{"cells":[],"object":`+x.object) {
			t.Errorf("includeObject=%s, the end of initial events %v: %s", x.include, x.initialEnd, b)
		}
	}
	if kind, version := q.ListKind(); kind != "Table" || version != "meta.k8s.io/v1" {
		t.Errorf("%s of %s", kind, version)
	}
}

// A cached key outlives its request and keeps none of it alive. A media type is part of the whole Accept header.
func TestAKeyHoldsNothingOfItsRequest(t *testing.T) {
	pod := &commonv1.Kind{Version: "v1", Kind: "Pod"}
	header := strings.Repeat("PartialObjectMetadataList", 2)
	as := header[:len(header)/2]
	q, err := New(&registryv1.APIResource{StorageResource: "pods", Kind: pod, StoredKind: pod}, &watchfanoutv1.Query{
		Output: &registryv1.Output{MediaType: frame.JSON, As: &commonv1.Kind{Version: as, Kind: as}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if q.EncodingKey.as != as || unsafe.StringData(q.EncodingKey.as) == unsafe.StringData(as) ||
		unsafe.StringData(q.EncodingKey.asVersion) == unsafe.StringData(as) {
		t.Error("the key refers to the header")
	}
}
