package admission

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

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
