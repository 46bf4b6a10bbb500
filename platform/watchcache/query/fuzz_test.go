package query

import (
	"testing"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// New accepts or rejects any selector without a panic. A query matches objects only in its namespace.
func FuzzQuery(f *testing.F) {
	f.Add("ns", "a=b,c in (d,e),!f", "metadata.name=x,spec.nodeName!=y")
	f.Add("", "\xff=\xfe", "a\\,b=c")
	f.Fuzz(func(t *testing.T, namespace, labels, fields string) {
		q, err := New(&registryv1.APIResource{
			StorageResource: "pods",
			Namespaced:      true,
			Resource:        &commonv1.Resource{Version: "v1", Resource: "pods"},
			Kind:            &commonv1.Kind{Version: "v1", Kind: "Pod"},
			StoredKind:      &commonv1.Kind{Version: "v1", Kind: "Pod"},
		}, &watchfanoutv1.Query{
			Namespace:     namespace,
			LabelSelector: labels,
			FieldSelector: fields,
			Output:        &registryv1.Output{MediaType: frame.JSON},
		})
		if err != nil {
			return
		}
		i := &cache.Item{
			Key:       "other/x",
			Namespace: "other",
			Name:      "x",
			Labels:    map[string]string{"a": "b"},
		}
		q.Matches(i)
		q.MayMatch(i)
		q.Describe()
		q.Trigger()
		if q.InNamespace(i) && namespace != "" && namespace != "other" {
			t.Errorf("%q selects an object of another namespace", namespace)
		}
	})
}
