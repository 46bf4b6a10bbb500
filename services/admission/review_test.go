package admission

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// A custom resource may have the field "items" and is no list for that. Its numbers keep their types.
func TestACustomResourceIsDecodedAsAnObject(t *testing.T) {
	c := &codec{kind: schema.GroupVersionKind{Group: "g", Version: "v1", Kind: "Thing"}, custom: true}
	c.decoder, c.encoder = unstructured.UnstructuredJSONScheme, unstructured.UnstructuredJSONScheme
	for _, items := range []string{`[]`, `{"x":1}`, `["x"]`, `[{"x":1}]`, `5`, `5.0`} {
		data := `{"apiVersion":"g/v1","items":` + items + `,"kind":"Thing",` +
			`"metadata":{"labels":{"a":"b"},"name":"n"}}` + "\n"
		obj, err := c.decode([]byte(data))
		if err != nil {
			t.Errorf("%s: %v", items, err)
			continue
		}
		if m, err := meta.Accessor(obj); err != nil || m.GetLabels()["a"] != "b" {
			t.Errorf("%s: %v, %v", items, obj, err)
		}
		if after, err := c.encode(obj); err != nil || string(after) != data {
			t.Errorf("%s: %s, %v", items, after, err)
		}
	}
}

// A webhook for one version of a resource reviews writes in its other versions, also of subresources.
func TestAReviewKnowsTheOtherVersions(t *testing.T) {
	m := equivalents(&admissionv1.Review{
		Resource: &commonv1.Resource{
			Group:       "g",
			Version:     "v2",
			Resource:    "things",
			Subresource: "scale",
		}, Kind: &commonv1.Kind{Group: "autoscaling", Version: "v1", Kind: "Scale"},
		Equivalents: []*admissionv1.Equivalent{{
			Resource: &commonv1.Resource{Group: "g", Version: "v1", Resource: "things", Subresource: "scale"},
			Kind:     &commonv1.Kind{Group: "autoscaling", Version: "v1", Kind: "Scale"},
		}}})
	v1 := schema.GroupVersionResource{Group: "g", Version: "v1", Resource: "things"}
	all := m.EquivalentResourcesFor(schema.GroupVersionResource{Group: "g", Version: "v2", Resource: "things"}, "scale")
	if len(all) != 2 {
		t.Errorf("equivalent: %v", all)
	}
	if k := m.KindFor(v1, "scale"); k.Kind != "Scale" {
		t.Errorf("kind %v", k)
	}
}
