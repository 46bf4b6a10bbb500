package installer

import (
	"strings"
	"weak"

	"k8s.io/kube-openapi/pkg/validation/spec"
)

// PodSpecContainers points to a part of the definitions of OpenAPI that a Set holds: the schema of a pod's containers.
func PodSpecContainers(s *Set) weak.Pointer[spec.Schema] {
	for name, d := range s.openapi.definitions {
		if strings.HasSuffix(name, "core.v1.PodSpec") {
			return weak.Make(d.Schema.Properties["containers"].Items.Schema)
		}
	}
	return weak.Pointer[spec.Schema]{}
}
