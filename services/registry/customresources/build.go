package customresources

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	openapibuilder "k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource/tableconvertor"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/scale"
	"k8s.io/client-go/scale/scheme/autoscalingv1"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"watershed.dev/platform/crd"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/managed"
)

// builder builds the storages and scopes of a CRD, as getOrCreateServingInfoFor of
// k8s.io/apiextensions-apiserver/pkg/apiserver does.
type builder struct {
	*crd.CRD
	set         *Set
	converter   *crd.Converter
	types       managedfields.TypeConverter
	replicas    managedfields.ResourcePathMappings
	statusReset map[fieldpath.APIVersion]*fieldpath.Set
	equivalents runtime.EquivalentResourceMapper
	terminating func() bool
	// open opens a version's storages. safe converts the objects that they read.
	open         map[string]func(safe runtime.ObjectConvertor) (customresource.CustomResourceStorage, error)
	apiResources []*registryv1.APIResource
}

// buildOnce builds the expensive parts unless they are built. It returns the error of the build.
func (s *servedCRD) buildOnce(t *Set) error {
	s.once.Do(func() { s.build(t) })
	return s.err
}

func (s *servedCRD) build(t *Set) {
	b := &builder{
		CRD:          s.CRD,
		set:          t,
		equivalents:  s.Equivalents(),
		replicas:     managedfields.ResourcePathMappings{},
		statusReset:  map[fieldpath.APIVersion]*fieldpath.Set{},
		open:         map[string]func(runtime.ObjectConvertor) (customresource.CustomResourceStorage, error){},
		apiResources: s.apiResources,
	}
	name := s.Name
	b.terminating = func() bool {
		now := t.crd(name)
		return now != nil && apihelpers.IsCRDConditionTrue(now.CustomResourceDefinition, apiextensionsv1.Terminating)
	}
	s.versions, s.err = b.build()
	s.builder = b
}

// requestScopeFor returns a scope whose conversions end with ctx. It builds the scope for each request, of parts that
// were built once. A shared scope would not do: a webhook's calls must end with the request, and upstream's storages
// and codecs pass no context.
func (b *builder) requestScopeFor(ctx context.Context, r *commonv1.Resource) (*handlers.RequestScope, error) {
	safe, unsafe := b.converter.WithContext(ctx)
	st, err := b.open[r.GetVersion()](safe)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(b.apiResources, func(apiResource *registryv1.APIResource) bool {
		return apiResource.Resource.Version == r.GetVersion() && apiResource.Resource.Subresource == r.GetSubresource()
	})
	return b.requestScope(b.apiResources[i], st, safe, unsafe)
}

func (b *builder) build() (map[string]*servedVersion, error) {
	var err error
	if b.converter, err = b.Converter(b.set.Converters); err != nil {
		return nil, err
	}
	safe, unsafe := b.converter.WithContext(context.Background()) // for the finalizer and without webhooks
	if b.types, err = b.typeConverter(); err != nil {
		return nil, err
	}
	for _, v := range b.Spec.Versions {
		sub, err := apihelpers.GetSubresourcesForVersion(b.CustomResourceDefinition, v.Name)
		if err != nil {
			return nil, err
		}
		b.replicas[b.Kind(v.Name).GroupVersion().String()] = replicasPath(sub)
	}
	all := map[string]*servedVersion{}
	for i := range b.Spec.Versions {
		v := &b.Spec.Versions[i]
		if !v.Storage && !v.Served {
			continue
		}
		open, err := b.storage(v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
		st, err := open(safe)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
		b.open[v.Name] = open
		all[v.Name] = &servedVersion{storage: st, scopes: map[string]*handlers.RequestScope{}}
		if st.Status != nil {
			maps.Copy(b.statusReset, st.Status.GetResetFields())
		}
	}
	for _, apiResource := range b.apiResources {
		v, ok := all[apiResource.Resource.Version]
		if !ok {
			continue
		}
		scope, err := b.requestScope(apiResource, v.storage, safe, unsafe)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", apiResource.Resource, err)
		}
		v.scopes[apiResource.Resource.Subresource] = scope
	}
	return all, nil
}

// replicasPath returns the path of the replicas that a scale subresource shows, or nil.
func replicasPath(sub *apiextensionsv1.CustomResourceSubresources) fieldpath.Path {
	if sub == nil || sub.Scale == nil {
		return nil
	}
	path := fieldpath.Path{}
	for _, name := range strings.Split(strings.TrimPrefix(sub.Scale.SpecReplicasPath, "."), ".") {
		path = append(path, fieldpath.PathElement{FieldName: &name})
	}
	return path
}

// typeConverter returns the types of objects' fields for managedFields. It deduces them if a schema cannot be built.
func (b *builder) typeConverter() (managedfields.TypeConverter, error) {
	specs := []*spec3.OpenAPI{{
		Version:    "3.0.0",
		Info:       &spec.Info{InfoProps: spec.InfoProps{Title: "Kubernetes CRD Swagger", Version: "v0.1.0"}},
		Components: &spec3.Components{Schemas: b.set.Models},
	}}
	for _, v := range b.Spec.Versions {
		s, err := openapibuilder.BuildOpenAPIV3(b.CustomResourceDefinition, v.Name, openapibuilder.Options{})
		if err != nil {
			return managedfields.NewDeducedTypeConverter(), nil
		}
		specs = append(specs, s)
	}
	merged, err := openapibuilder.MergeSpecsV3(specs...)
	if err != nil {
		return managedfields.NewDeducedTypeConverter(), nil
	}
	return managedfields.NewTypeConverter(merged.Components.Schemas, b.Spec.PreserveUnknownFields)
}

// storage builds the expensive parts of a version's storages, and returns a function that opens the storages.
func (b *builder) storage(v *apiextensionsv1.CustomResourceDefinitionVersion) (
	func(runtime.ObjectConvertor) (customresource.CustomResourceStorage, error), error) {
	internal, err := crd.Validation(b.CustomResourceDefinition, v.Name)
	if err != nil {
		return nil, err
	}
	var properties *apiextensions.JSONSchemaProps
	if internal != nil {
		properties = internal.OpenAPIV3Schema
	}
	validator, _, err := validation.NewSchemaValidator(properties)
	if err != nil {
		return nil, err
	}
	sub, err := apihelpers.GetSubresourcesForVersion(b.CustomResourceDefinition, v.Name)
	if err != nil {
		return nil, err
	}
	var status *apiextensions.CustomResourceSubresourceStatus
	var statusValidator validation.SchemaValidator
	if sub != nil && sub.Status != nil {
		status = &apiextensions.CustomResourceSubresourceStatus{}
		if properties != nil {
			if statusSchema, ok := properties.Properties["status"]; ok {
				if statusValidator, _, err = validation.NewSchemaValidator(&statusSchema); err != nil {
					return nil, err
				}
			}
		}
	}
	var replicas *apiextensions.CustomResourceSubresourceScale
	if sub != nil && sub.Scale != nil {
		replicas = &apiextensions.CustomResourceSubresourceScale{}
		convert := apiextensionsv1.Convert_v1_CustomResourceSubresourceScale_To_apiextensions_CustomResourceSubresourceScale
		if err := convert(sub.Scale, replicas, nil); err != nil {
			return nil, err
		}
	}
	table, _ := tableconvertor.New(columns(v.AdditionalPrinterColumns)) // with the columns before an invalid column
	kind := b.Kind(v.Name)
	listKind := kind
	listKind.Kind = b.Status.AcceptedNames.ListKind
	singular := schema.GroupResource{Group: b.Spec.Group, Resource: b.Status.AcceptedNames.Singular}
	structural, err := b.Structural(v.Name)
	if err != nil {
		return nil, err
	}
	strategy := customresource.NewStrategy(crd.Typer(b.Parameters(v.Name)), b.Namespaced(), kind, validator,
		statusValidator, structural, status, replicas, v.SelectableFields)
	return func(safe runtime.ObjectConvertor) (customresource.CustomResourceStorage, error) {
		return customresource.NewStorage(b.Resource(v.Name).GroupResource(), singular, kind, listKind, strategy,
			b.set.Storage.CustomRESTOptions(b.StorageCodec(v.Name, safe)), b.Status.AcceptedNames.Categories, table,
			b.replicas)
	}, nil
}

var age = apiextensionsv1.CustomResourceColumnDefinition{
	Name:        "Age",
	Type:        "date",
	Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"],
	JSONPath:    ".metadata.creationTimestamp",
}

func columns(own []apiextensionsv1.CustomResourceColumnDefinition) []apiextensionsv1.CustomResourceColumnDefinition {
	if len(own) > 0 {
		return own
	}
	return []apiextensionsv1.CustomResourceColumnDefinition{age}
}

// scaleColumns returns the Table columns of a scale subresource.
func scaleColumns(sub *apiextensionsv1.CustomResourceSubresources) []apiextensionsv1.CustomResourceColumnDefinition {
	var all []apiextensionsv1.CustomResourceColumnDefinition
	if sub != nil && sub.Scale != nil {
		if sub.Scale.SpecReplicasPath != "" {
			all = append(all, apiextensionsv1.CustomResourceColumnDefinition{
				Name:        "Desired",
				Type:        "integer",
				Description: "Number of desired replicas",
				JSONPath:    ".spec.replicas",
			})
		}
		if sub.Scale.StatusReplicasPath != "" {
			all = append(all, apiextensionsv1.CustomResourceColumnDefinition{
				Name:        "Available",
				Type:        "integer",
				Description: "Number of actual replicas",
				JSONPath:    ".status.replicas",
			})
		}
	}
	return append(all, age)
}

// requestScope builds the RequestScope of a discovery entry.
func (b *builder) requestScope(apiResource *registryv1.APIResource, st customresource.CustomResourceStorage,
	safe, unsafe runtime.ObjectConvertor) (*handlers.RequestScope, error) {
	v := apiResource.Resource.Version
	parameters := b.Parameters(v)
	typer := crd.Typer(parameters)
	kind := b.Kind(v)
	scope := &handlers.RequestScope{
		Resource:                 b.Resource(v),
		Subresource:              apiResource.Resource.Subresource,
		Kind:                     kind,
		Namespaced:               b.Namespaced(),
		InMemory:                 kind.GroupVersion(),
		Serializer:               b.Serializer(typer, safe),
		ParameterCodec:           runtime.NewParameterCodec(parameters),
		Creater:                  crd.Creater{},
		Convertor:                safe,
		UnsafeConvertor:          unsafe,
		Defaulter:                b.Defaulter(parameters),
		Typer:                    typer,
		EquivalentResourceMapper: b.equivalents,
		Tables:                   st.CustomResource,
		APIResource:              apiResource,
		Terminating:              b.terminating,
	}
	scope.FromStorage = func(list *unstructured.UnstructuredList) (*unstructured.UnstructuredList, error) {
		return b.FromStorage(safe, list, kind.GroupVersion())
	}
	var reset map[fieldpath.APIVersion]*fieldpath.Set
	hub := kind.GroupVersion()
	switch apiResource.Resource.Subresource {
	case "":
		scope.Storage, reset = st.CustomResource, st.CustomResource.GetResetFields()
		scope.GetAttrs = st.CustomResource.PredicateFunc(labels.Everything(), fields.Everything()).GetAttrs
	case "status":
		scope.Storage, reset = statusStorage{st.Status}, b.statusReset
	case "scale":
		scope.Storage = scaleStorage{st.Scale}
		scope.Kind, scope.InMemory = autoscalingv1.SchemeGroupVersion.WithKind(
			"Scale",
		), autoscalingv1.SchemeGroupVersion
		var options []serializer.CodecFactoryOptionsMutator
		if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
			options = append(options, serializer.WithSerializer(cbor.NewSerializerInfo))
		}
		scope.Serializer = serializer.NewCodecFactory(scale.NewScaleConverter().Scheme(), options...)
		sub, err := apihelpers.GetSubresourcesForVersion(b.CustomResourceDefinition, v)
		if err != nil {
			return nil, err
		}
		if scope.Tables, err = tableconvertor.New(scaleColumns(sub)); err != nil {
			return nil, err
		}
	}
	upstream, err := managedfields.NewDefaultCRDFieldManager(
		b.types,
		scope.Convertor,
		scope.Defaulter,
		scope.Creater,
		scope.Kind,
		hub,
		scope.Subresource,
		fieldpath.NewExcludeFilterSetMap(reset),
	)
	if err != nil {
		return nil, err
	}
	if scope.FieldManager = managed.New(upstream); b.UsesWebhook() { // requestScopeFor
		scope.FieldManager = managed.Uncached(upstream)
	}
	return scope, nil
}

// statusStorage and scaleStorage make upstream's storages implement rest.Storage. Upstream's lack Destroy.
type (
	statusStorage struct{ *customresource.StatusREST }
	scaleStorage  struct{ *customresource.ScaleREST }
)

// Destroy implements rest.Storage.
func (statusStorage) Destroy() {}

// Destroy implements rest.Storage.
func (scaleStorage) Destroy() {}

var (
	_ rest.Storage = statusStorage{}
	_ rest.Storage = scaleStorage{}
)
