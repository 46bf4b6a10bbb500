package responsewriters

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// OffersTransform reports whether objects and lists are offered in another kind in a media type: as metadata, or as a
// Table (k8s.io/apiserver/pkg/endpoints/handlers, targetEncodingForTransform).
func OffersTransform(mimeType, mimeSubType string, as *schema.GroupVersionKind) bool {
	if as.Group != metav1.GroupName || as.Version != "v1" && as.Version != "v1beta1" {
		return false
	}
	switch as.Kind {
	case "Table":
		return mimeType == "application" && (mimeSubType == "json" || mimeSubType == "yaml")
	case "PartialObjectMetadata", "PartialObjectMetadataList":
		return true
	}
	return false
}
