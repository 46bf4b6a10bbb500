package customresources

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/crd"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/storage"
)

// These are the verbs of custom resources, in the order of discovery.
var (
	allVerbs         = []string{"delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"}
	terminatingVerbs = []string{"delete", "deletecollection", "get", "list", "watch"}
	subresourceVerbs = []string{"get", "patch", "update"}
)

// mediaTypes returns the media types of custom resources.
func mediaTypes() []string {
	types := []string{runtime.ContentTypeJSON, runtime.ContentTypeYAML, runtime.ContentTypeProtobuf}
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		types = append(types, runtime.ContentTypeCBOR)
	}
	return types
}

// setDigest sets e.Digest: a hash of the entry without its CrdRevision.
func setDigest(e *registryv1.APIResource) *registryv1.APIResource {
	crdRevision := e.CrdRevision
	e.CrdRevision, e.Digest = 0, 0
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
	e.CrdRevision = crdRevision
	if err == nil {
		sum := sha256.Sum256(data)
		e.Digest = binary.BigEndian.Uint64(sum[:])
	}
	return e
}

// apiResourcesOf returns a CRD's discovery entries: an entry for each served version and each of its subresources.
func apiResourcesOf(d *crd.CRD, st *storage.Resource) []*registryv1.APIResource {
	var all []*registryv1.APIResource
	for _, v := range d.Spec.Versions {
		if !v.Served {
			continue
		}
		parent := setDigest(apiResourceOf(d, st, v))
		all = append(all, parent)
		sub, err := apihelpers.GetSubresourcesForVersion(d.CustomResourceDefinition, v.Name)
		if err != nil || sub == nil {
			continue
		}
		add := func(name string, k *commonv1.Kind) {
			all = append(all, setDigest(&registryv1.APIResource{
				Resource: &commonv1.Resource{
					Group:       d.Spec.Group,
					Version:     v.Name,
					Resource:    parent.Resource.Resource,
					Subresource: name,
				},
				Namespaced:     parent.Namespaced,
				Kind:           k,
				Verbs:          subresourceVerbs,
				Table:          true,
				MediaTypes:     mediaTypes(),
				Unstructured:   true,
				NotEstablished: parent.NotEstablished,
				Warnings:       parent.Warnings,
				CrdRevision:    parent.CrdRevision,
			}))
		}
		if sub.Status != nil {
			add("status", parent.Kind)
		}
		if sub.Scale != nil {
			add("scale", &commonv1.Kind{Group: "autoscaling", Version: "v1", Kind: "Scale"})
		}
	}
	return all
}

// apiResourceOf returns the discovery entry of a version.
func apiResourceOf(d *crd.CRD, st *storage.Resource,
	v apiextensionsv1.CustomResourceDefinitionVersion) *registryv1.APIResource {
	crdRevision, _ := storage.Revision(d) // Set.set accepts no CRD without a revision
	names := d.Status.AcceptedNames
	verbs := allVerbs
	if apihelpers.IsCRDConditionTrue(d.CustomResourceDefinition, apiextensionsv1.Terminating) {
		verbs = terminatingVerbs
	}
	storageVersionHash := "" // as in kube-apiserver, a storage version that is not served has none
	if apihelpers.HasServedCRDVersion(d.CustomResourceDefinition, d.StorageVersion) {
		storageVersionHash = discovery.StorageVersionHash(d.Spec.Group, d.StorageVersion, d.Spec.Names.Kind)
	}
	apiResource := &registryv1.APIResource{
		Resource: &commonv1.Resource{
			Group:    d.Spec.Group,
			Version:  v.Name,
			Resource: names.Plural,
		},
		Namespaced:      d.Namespaced(),
		Kind:            &commonv1.Kind{Group: d.Spec.Group, Version: v.Name, Kind: names.Kind},
		Verbs:           verbs,
		ShortNames:      names.ShortNames,
		Categories:      names.Categories,
		Singular:        names.Singular,
		ListKind:        names.ListKind,
		StorageResource: st.Name(),
		StoredKind: &commonv1.Kind{
			Group:   d.Spec.Group,
			Version: d.StorageVersion,
			Kind:    names.Kind,
		},
		SelectableFields:   map[string]string{"metadata.name": "metadata.name"},
		Table:              true,
		MediaTypes:         mediaTypes(),
		Unstructured:       true,
		NotEstablished:     !apihelpers.IsCRDConditionTrue(d.CustomResourceDefinition, apiextensionsv1.Established),
		StorageVersionHash: storageVersionHash,
		Warnings:           warningsOf(d, v),
		ConvertedFields:    d.UsesWebhook() && len(v.SelectableFields) > 0,
		CrdRevision:        int64(crdRevision),
	}
	if apiResource.Namespaced {
		apiResource.SelectableFields["metadata.namespace"] = "metadata.namespace"
	}
	for _, f := range v.SelectableFields {
		label := strings.TrimPrefix(f.JSONPath, ".")
		apiResource.SelectableFields[label] = label
	}
	return apiResource
}

// warningsOf returns the warnings in each response of a deprecated version.
func warningsOf(d *crd.CRD, v apiextensionsv1.CustomResourceDefinitionVersion) []string {
	if !v.Deprecated {
		return nil
	}
	if v.DeprecationWarning != nil {
		return []string{*v.DeprecationWarning}
	}
	text := fmt.Sprintf("%s/%s %s is deprecated", d.Spec.Group, v.Name, d.Spec.Names.Kind)
	var better []string
	for _, o := range d.Spec.Versions {
		if o.Served && !o.Deprecated && version.CompareKubeAwareVersionStrings(v.Name, o.Name) < 0 {
			better = append(better, o.Name)
		}
	}
	if len(better) == 0 {
		return []string{text}
	}
	newest := slices.MaxFunc(better, version.CompareKubeAwareVersionStrings)
	return []string{fmt.Sprintf("%s; use %s/%s %s", text, d.Spec.Group, newest, d.Spec.Names.Kind)}
}
