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

	"watershed.dev/platform/crd"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/storage"
)

// The verbs of custom resources, in the order that discovery tells them.
var (
	allVerbs         = []string{"delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"}
	terminatingVerbs = []string{"delete", "deletecollection", "get", "list", "watch"}
	subresourceVerbs = []string{"get", "patch", "update"}
)

var mediaTypes = []string{runtime.ContentTypeJSON, runtime.ContentTypeYAML, runtime.ContentTypeProtobuf}

// sign gives an entry its digest.
func sign(e *registryv1.APIResource) *registryv1.APIResource {
	at := e.CrdRevision
	e.CrdRevision, e.Digest = 0, 0
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
	e.CrdRevision = at
	if err == nil {
		sum := sha256.Sum256(data)
		e.Digest = binary.BigEndian.Uint64(sum[:])
	}
	return e
}

// entriesOf writes a definition's catalog entries, one for each served version and subresource.
func entriesOf(d *crd.CRD, st *storage.Stored) []*registryv1.APIResource {
	var all []*registryv1.APIResource
	for _, v := range d.Spec.Versions {
		if !v.Served {
			continue
		}
		main := sign(entryOf(d, st, v))
		all = append(all, main)
		sub, err := apihelpers.GetSubresourcesForVersion(d.CustomResourceDefinition, v.Name)
		if err != nil || sub == nil {
			continue
		}
		add := func(name string, k *commonv1.Kind) {
			all = append(all, sign(&registryv1.APIResource{
				Resource: &commonv1.Resource{
					Group:       d.Spec.Group,
					Version:     v.Name,
					Resource:    main.Resource.Resource,
					Subresource: name,
				},
				Namespaced:     main.Namespaced,
				Kind:           k,
				Verbs:          subresourceVerbs,
				Table:          true,
				MediaTypes:     mediaTypes,
				Unstructured:   true,
				NotEstablished: main.NotEstablished,
				Warnings:       main.Warnings,
				CrdRevision:    main.CrdRevision,
			}))
		}
		if sub.Status != nil {
			add("status", main.Kind)
		}
		if sub.Scale != nil {
			add("scale", &commonv1.Kind{Group: "autoscaling", Version: "v1", Kind: "Scale"})
		}
	}
	return all
}

// entryOf is the entry of one version.
func entryOf(d *crd.CRD, st *storage.Stored,
	v apiextensionsv1.CustomResourceDefinitionVersion) *registryv1.APIResource {
	definedAt, _ := storage.Revision(d) // it has one, or it would not be served
	names := d.Status.AcceptedNames
	verbs := allVerbs
	if apihelpers.IsCRDConditionTrue(d.CustomResourceDefinition, apiextensionsv1.Terminating) {
		verbs = terminatingVerbs
	}
	main := &registryv1.APIResource{
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
		MediaTypes:         mediaTypes,
		Unstructured:       true,
		NotEstablished:     !apihelpers.IsCRDConditionTrue(d.CustomResourceDefinition, apiextensionsv1.Established),
		StorageVersionHash: discovery.StorageVersionHash(d.Spec.Group, d.StorageVersion, d.Spec.Names.Kind),
		Warnings:           warningsOf(d, v),
		ConvertedFields:    d.UsesWebhook() && len(v.SelectableFields) > 0,
		CrdRevision:        int64(definedAt),
	}
	if main.Namespaced {
		main.SelectableFields["metadata.namespace"] = "metadata.namespace"
	}
	for _, f := range v.SelectableFields {
		label := strings.TrimPrefix(f.JSONPath, ".")
		main.SelectableFields[label] = label
	}
	return main
}

// warningsOf is what every answer in a deprecated version carries.
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
