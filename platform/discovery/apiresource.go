package discovery

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// ToMetaV1 converts an entry to the APIResource of discovery. It sets the fields that kube-apiserver's installer sets
// (k8s.io/apiserver/pkg/endpoints/installer.go).
func ToMetaV1(e *registryv1.APIResource) metav1.APIResource {
	name := e.Resource.Resource
	if e.Resource.Subresource != "" {
		name += "/" + e.Resource.Subresource
	}
	r := metav1.APIResource{
		Name:               name,
		SingularName:       e.Singular,
		Namespaced:         e.Namespaced,
		Kind:               e.Kind.Kind,
		Verbs:              append(metav1.Verbs{}, e.Verbs...),
		ShortNames:         e.ShortNames,
		Categories:         e.Categories,
		StorageVersionHash: e.StorageVersionHash,
	}
	if e.DiscoveryKind != "" {
		r.Kind = e.DiscoveryKind
	}
	if foreignKind(e) {
		r.Group, r.Version = e.Kind.Group, e.Kind.Version
	}
	return r
}

// foreignKind returns true if the group version of an entry's kind differs from its resource's, as for scale.
func foreignKind(e *registryv1.APIResource) bool {
	return e.Kind.Group != e.Resource.Group || e.Kind.Version != e.Resource.Version
}
