// Package crd turns a CustomResourceDefinition into what reading, checking and converting its objects takes. Registry
// stores and serves by it; admission reviews by it.
//
// The behaviour is that of k8s.io/apiextensions-apiserver/pkg/apiserver at 0.36 (customresource_handler.go).
package crd

import (
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/scale/scheme/autoscalingv1"
)

// CRD is one CustomResourceDefinition, ready to read objects by. It does not change.
type CRD struct {
	*apiextensionsv1.CustomResourceDefinition
	// StorageVersion is the version that objects are written to etcd in.
	StorageVersion string
	// Schemas are the structural schemas by version; a version without a schema has none.
	Schemas map[string]*structuralschema.Structural
}

// New reads a definition. An error says that it cannot be served.
func New(d *apiextensionsv1.CustomResourceDefinition) (*CRD, error) {
	for name, accepted := range map[string]string{
		"plural":    d.Status.AcceptedNames.Plural,
		"singular":  d.Status.AcceptedNames.Singular,
		"kind":      d.Status.AcceptedNames.Kind,
		"list kind": d.Status.AcceptedNames.ListKind,
	} {
		if accepted == "" {
			return nil, fmt.Errorf("the definition %s has no accepted %s", d.Name, name)
		}
	}
	out := &CRD{CustomResourceDefinition: d, Schemas: map[string]*structuralschema.Structural{}}
	var err error
	if out.StorageVersion, err = apihelpers.GetCRDStorageVersion(d); err != nil {
		return nil, err
	}
	for _, v := range d.Spec.Versions {
		internal, err := Validation(d, v.Name)
		if err != nil {
			return nil, err
		}
		if internal == nil {
			continue
		}
		s, err := structuralschema.NewStructural(internal.OpenAPIV3Schema)
		if d.Spec.PreserveUnknownFields {
			out.Schemas[v.Name] = s
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("the schema of %s in %s is not structural: %w", d.Name, v.Name, err)
		}
		s = s.DeepCopy() // its defaults are the definition's own
		if err := defaulting.PruneDefaults(s); err != nil {
			return nil, fmt.Errorf("the defaults of %s in %s: %w", d.Name, v.Name, err)
		}
		out.Schemas[v.Name] = s
	}
	return out, nil
}

// Validation is a version's schema in the hub version, or nil.
func Validation(d *apiextensionsv1.CustomResourceDefinition,
	version string) (*apiextensions.CustomResourceValidation, error) {
	v, err := apihelpers.GetSchemaForVersion(d, version)
	if err != nil || v == nil {
		return nil, err
	}
	internal := &apiextensions.CustomResourceValidation{}
	return internal, apiextensionsv1.Convert_v1_CustomResourceValidation_To_apiextensions_CustomResourceValidation(v,
		internal, nil)
}

// Same says whether objects are read alike under both definitions: kube-apiserver builds a new storage where they are
// not.
func Same(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a.UID == b.UID && a.Generation == b.Generation &&
		equalNames(&a.Status.AcceptedNames, &b.Status.AcceptedNames)
}

func equalNames(a, b *apiextensionsv1.CustomResourceDefinitionNames) bool {
	return a.Plural == b.Plural && a.Singular == b.Singular && a.Kind == b.Kind && a.ListKind == b.ListKind &&
		fmt.Sprint(a.ShortNames, a.Categories) == fmt.Sprint(b.ShortNames, b.Categories)
}

// Namespaced says whether objects have namespaces.
func (d *CRD) Namespaced() bool { return d.Spec.Scope == apiextensionsv1.NamespaceScoped }

// Resource is the resource in a version.
func (d *CRD) Resource(version string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: d.Spec.Group, Version: version, Resource: d.Status.AcceptedNames.Plural}
}

// Kind is the kind in a version.
func (d *CRD) Kind(version string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: d.Spec.Group, Version: version, Kind: d.Status.AcceptedNames.Kind}
}

// GroupKind is the kind in every version.
func (d *CRD) GroupKind() schema.GroupKind { return d.Kind("").GroupKind() }

// UsesWebhook says whether another version of an object is more than its apiVersion.
func (d *CRD) UsesWebhook() bool {
	return d.Spec.Conversion != nil && d.Spec.Conversion.Strategy == apiextensionsv1.WebhookConverter
}

// Equivalents knows the definition's versions as one resource.
func (d *CRD) Equivalents() runtime.EquivalentResourceMapper {
	r := runtime.NewEquivalentResourceRegistry()
	for _, v := range d.Spec.Versions {
		r.RegisterKindFor(d.Resource(v.Name), "", d.Kind(v.Name))
		sub, err := apihelpers.GetSubresourcesForVersion(d.CustomResourceDefinition, v.Name)
		if err != nil || sub == nil {
			continue
		}
		if sub.Status != nil {
			r.RegisterKindFor(d.Resource(v.Name), "status", d.Kind(v.Name))
		}
		if sub.Scale != nil {
			r.RegisterKindFor(d.Resource(v.Name), "scale", autoscalingv1.SchemeGroupVersion.WithKind("Scale"))
		}
	}
	return r
}

// Parameters is the scheme of the options that requests in a version carry.
func (d *CRD) Parameters(version string) *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddUnversionedTypes(schema.GroupVersion{Group: d.Spec.Group, Version: version}, &metav1.ListOptions{},
		&metav1.GetOptions{}, &metav1.DeleteOptions{})
	return s
}

// Typer tells objects' kinds, and options' by parameters.
func Typer(parameters runtime.ObjectTyper) runtime.ObjectTyper {
	return apiextensionsapiserver.UnstructuredObjectTyper{
		Delegate:          parameters,
		UnstructuredTyper: crdserverscheme.NewUnstructuredObjectTyper(),
	}
}

// Creater makes empty objects of any kind.
type Creater struct{}

// New implements runtime.ObjectCreater.
func (Creater) New(kind schema.GroupVersionKind) (runtime.Object, error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(kind)
	return u, nil
}

// Defaulter fills in the defaults of the definition's schemas, and others' by delegate.
func (d *CRD) Defaulter(delegate runtime.ObjectDefaulter) runtime.ObjectDefaulter {
	return defaulter{d, delegate}
}

type defaulter struct {
	*CRD
	delegate runtime.ObjectDefaulter
}

// Default implements runtime.ObjectDefaulter.
func (d defaulter) Default(in runtime.Object) {
	u, ok := in.(runtime.Unstructured)
	if !ok || u.GetObjectKind().GroupVersionKind().GroupKind() != d.GroupKind() {
		d.delegate.Default(in)
		return
	}
	defaulting.Default(u.UnstructuredContent(), d.Schemas[u.GetObjectKind().GroupVersionKind().Version])
}
