package watchfanout

import (
	"path"
	"strings"
	"testing"

	"watershed.dev/platform/frame"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// A token leads to a place under the list's own prefix, or to registry; one that is made comes back as it was.
func FuzzContinue(f *testing.F) {
	f.Add(encodeContinue(12, "/ns/name\x00"))
	f.Add("eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiIvLi4vc2VjcmV0cyJ9")
	f.Fuzz(func(t *testing.T, token string) {
		revision, start, err := decodeContinue(token)
		if err != nil {
			return
		}
		if revision <= 0 || strings.HasPrefix(start, "/") || path.Clean("/"+start) != "/"+start {
			t.Errorf("%q leads to %q at %d", token, start, revision)
		}
	})
}

// Whatever a client selects by, it is a query or an error, and objects are matched without a panic and only in its
// namespace.
func FuzzQuery(f *testing.F) {
	f.Add("ns", "a=b,c in (d,e),!f", "metadata.name=x,spec.nodeName!=y")
	f.Add("", "\xff=\xfe", "a\\,b=c")
	f.Fuzz(func(t *testing.T, namespace, labels, fields string) {
		q, err := newQuery(&watchfanoutv1.Query{
			Entry: &registryv1.ResourceEntry{StoredAs: "pods", Namespaced: true, Resource: &commonv1.Resource{Version: "v1", Resource: "pods"},
				Kind: &commonv1.Kind{Version: "v1", Kind: "Pod"}, StoredKind: &commonv1.Kind{Version: "v1", Kind: "Pod"}},
			Namespace: namespace, LabelSelector: labels, FieldSelector: fields, Output: &registryv1.Output{MediaType: frame.JSON}})
		if err != nil {
			return
		}
		i := &cache.Item{Key: "other/x", Namespace: "other", Name: "x", Labels: map[string]string{"a": "b"}, Fields: map[string]string{"metadata.name": "x"}}
		q.matches(i)
		q.topic()
		if q.inScope(i) && namespace != "" && namespace != "other" {
			t.Errorf("%q holds an object of another namespace", namespace)
		}
	})
}
