// Package crd derives from a CustomResourceDefinition the codecs, defaults and converters of its objects. The registry
// stores and serves objects with it; admission decodes them with it.
//
// The behaviour is that of k8s.io/apiextensions-apiserver/pkg/apiserver at 0.36 (customresource_handler.go). The
// package does not watch CRDs, and starts no goroutine. A CRD is immutable; any goroutine may use a Converter.
package crd

import (
	"fmt"
	"reflect"
	"sync"
	"weak"

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

	"watershed.dev/platform/recovery"
)

// CRD is an immutable CustomResourceDefinition with its structural schemas.
type CRD struct {
	*apiextensionsv1.CustomResourceDefinition
	// StorageVersion is the version of objects in etcd.
	StorageVersion string
	// schemas has an entry for each version.
	schemas map[string]*versionSchema
}

// versionSchema is the structural schema of a version, built on first use. Most CRDs of a cluster have no objects, and
// the structural schemas of a CRD take 0.3 MB (docs/benchmarks/performance.md).
type versionSchema struct {
	once   sync.Once
	schema *structuralschema.Structural
	err    error
}

// ValidateNames returns an error if an accepted name is missing, or if the accepted plural is not that of the CRD's own
// name. A write of the status could otherwise give the objects the keys of another resource.
func ValidateNames(d *apiextensionsv1.CustomResourceDefinition) error {
	names := &d.Status.AcceptedNames
	for _, name := range [...]struct{ name, accepted string }{
		{"plural", names.Plural},
		{"singular", names.Singular},
		{"kind", names.Kind},
		{"list kind", names.ListKind},
	} {
		if name.accepted == "" {
			return fmt.Errorf("the CRD %s has no accepted %s", d.Name, name.name)
		}
	}
	if names.Plural+"."+d.Spec.Group != d.Name {
		return fmt.Errorf("the CRD %s has the accepted plural %q", d.Name, names.Plural)
	}
	return nil
}

// New returns the CRD of a definition. An error means that the CRD cannot be served.
func New(d *apiextensionsv1.CustomResourceDefinition) (*CRD, error) {
	if err := ValidateNames(d); err != nil {
		return nil, err
	}
	out := &CRD{CustomResourceDefinition: d, schemas: map[string]*versionSchema{}}
	var err error
	if out.StorageVersion, err = apihelpers.GetCRDStorageVersion(d); err != nil {
		return nil, err
	}
	for _, v := range d.Spec.Versions {
		out.schemas[v.Name] = &versionSchema{}
	}
	return out, nil
}

// Structural returns the structural schema of a version, or nil if the version has no schema or does not exist. It
// returns an error if the schema is not structural. Objects then cannot be decoded in this version, and registry serves
// no version of the CRD.
func (d *CRD) Structural(version string) (*structuralschema.Structural, error) {
	v, ok := d.schemas[version]
	if !ok {
		return nil, nil
	}
	v.once.Do(func() {
		defer recovery.ToError("building the schema of "+d.Name, &v.err) // once does not call it again
		v.schema, v.err = structural(d.CustomResourceDefinition, version)
	})
	return v.schema, v.err
}

// structural returns the structural schema of a version, or nil. CRDs that share a schema share its structural schema.
func structural(d *apiextensionsv1.CustomResourceDefinition, version string) (*structuralschema.Structural, error) {
	v, err := apihelpers.GetSchemaForVersion(d, version)
	if err != nil || v == nil {
		return nil, err
	}
	known, key := &structurals[0], weak.Make(v)
	if d.Spec.PreserveUnknownFields {
		known = &structurals[1]
	}
	if s := known.get(key); s != nil {
		return s, nil
	}
	internal, err := Validation(d, version)
	if err != nil {
		return nil, err
	}
	s, err := structuralschema.NewStructural(internal.OpenAPIV3Schema)
	if !d.Spec.PreserveUnknownFields {
		if err != nil {
			return nil, fmt.Errorf("the schema of %s in %s is not structural: %w", d.Name, version, err)
		}
		s = s.DeepCopy() // s shares its defaults with d
		if err := defaulting.PruneDefaults(s); err != nil {
			return nil, fmt.Errorf("the defaults of %s in %s: %w", d.Name, version, err)
		}
	}
	if s != nil {
		known.put(key, s)
	}
	return s, nil
}

// Validation returns the schema of a version in the internal API version, or nil.
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

// Same returns true if both CRDs decode objects identically. kube-apiserver builds a new storage if they do not. After
// a restore of etcd, a generation may have another content.
func Same(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a == b || a.UID == b.UID && a.Generation == b.Generation &&
		equalNames(&a.Status.AcceptedNames, &b.Status.AcceptedNames) && reflect.DeepEqual(a.Spec, b.Spec)
}

func equalNames(a, b *apiextensionsv1.CustomResourceDefinitionNames) bool {
	return a.Plural == b.Plural && a.Singular == b.Singular && a.Kind == b.Kind && a.ListKind == b.ListKind &&
		fmt.Sprint(a.ShortNames, a.Categories) == fmt.Sprint(b.ShortNames, b.Categories)
}

// Namespaced returns true if the objects have namespaces.
func (d *CRD) Namespaced() bool { return d.Spec.Scope == apiextensionsv1.NamespaceScoped }

// Resource returns the GroupVersionResource of a version.
func (d *CRD) Resource(version string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: d.Spec.Group, Version: version, Resource: d.Status.AcceptedNames.Plural}
}

// Kind returns the GroupVersionKind of a version.
func (d *CRD) Kind(version string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: d.Spec.Group, Version: version, Kind: d.Status.AcceptedNames.Kind}
}

// GroupKind returns the group and kind of all versions.
func (d *CRD) GroupKind() schema.GroupKind { return d.Kind("").GroupKind() }

// UsesWebhook returns true if a webhook converts the objects. Otherwise a conversion changes only the apiVersion.
func (d *CRD) UsesWebhook() bool {
	return d.Spec.Conversion != nil && d.Spec.Conversion.Strategy == apiextensionsv1.WebhookConverter
}

// Equivalents returns a mapper that treats all versions of the CRD as one resource.
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

// Parameters returns the scheme of the request options of a version.
func (d *CRD) Parameters(version string) *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddUnversionedTypes(schema.GroupVersion{Group: d.Spec.Group, Version: version}, &metav1.ListOptions{},
		&metav1.GetOptions{}, &metav1.DeleteOptions{})
	return s
}

// Typer returns the kinds of unstructured objects. It delegates options to parameters.
func Typer(parameters runtime.ObjectTyper) runtime.ObjectTyper {
	return apiextensionsapiserver.UnstructuredObjectTyper{
		Delegate:          parameters,
		UnstructuredTyper: crdserverscheme.NewUnstructuredObjectTyper(),
	}
}

// Creater creates empty objects of any kind.
type Creater struct{}

// New implements runtime.ObjectCreater.
func (Creater) New(kind schema.GroupVersionKind) (runtime.Object, error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(kind)
	return u, nil
}

// Defaulter applies the defaults of the CRD's schemas. It delegates objects of other kinds.
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
	s, err := d.Structural(u.GetObjectKind().GroupVersionKind().Version)
	if err != nil {
		return // coerce returns the error for the same object
	}
	defaulting.Default(u.UnstructuredContent(), s)
}
