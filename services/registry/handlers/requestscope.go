// Package verbs is what can be done to objects: get, list, create, update, patch, apply, delete and deletecollection
// over rest.Storage, bytes in and bytes out.
//
// The behaviour is that of k8s.io/apiserver/pkg/endpoints/handlers at 0.36, call by call; what differs is that there is
// no HTTP request and that admission and authorization are asked for through a Gate.
package handlers

import (
	"fmt"
	"net/url"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	apistorage "k8s.io/apiserver/pkg/storage"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/managed"
	"watershed.dev/services/registry/storage"
)

// RequestScope is one resource or subresource in one served version.
type RequestScope struct {
	Resource    schema.GroupVersionResource
	Subresource string
	// Kind is what a request's body and answer hold, in the served version.
	Kind       schema.GroupVersionKind
	Storage    rest.Storage
	Namespaced bool

	Serializer               runtime.NegotiatedSerializer
	ParameterCodec           runtime.ParameterCodec
	Creater                  runtime.ObjectCreater
	Convertor                runtime.ObjectConvertor
	Defaulter                runtime.ObjectDefaulter
	Typer                    runtime.ObjectTyper
	UnsafeConvertor          runtime.ObjectConvertor
	FieldManager             *managed.FieldManager
	EquivalentResourceMapper runtime.EquivalentResourceMapper
	// InMemory is the version that objects have in memory; empty for the internal one.
	InMemory schema.GroupVersion
	// Tables makes Table rows; the storage itself does where it is nil.
	Tables rest.TableConvertor
	// GetAttrs tells what selectors ask of an object; only where the endpoint's version has fields of its own.
	GetAttrs apistorage.AttrFunc
	// FromStorage brings custom resources as they are stored to the endpoint's version.
	FromStorage func(*unstructured.UnstructuredList) (*unstructured.UnstructuredList, error)
	// ResponseCache are the objects as they were last answered, where the endpoint answers them as the log carries them; nil:
	// each is read and encoded, as custom resources are.
	ResponseCache *storage.ResponseCache
	// Terminating says whether nothing more may be created, since the definition is being deleted. It may be nil.
	Terminating func() bool

	// APIResource is what the catalog says of it.
	APIResource *registryv1.APIResource
}

// HubGroupVersion is the version that objects have in memory.
func (scope *RequestScope) HubGroupVersion() schema.GroupVersion {
	if !scope.InMemory.Empty() {
		return scope.InMemory
	}
	return schema.GroupVersion{Group: scope.Kind.Group, Version: runtime.APIVersionInternal}
}

// TableConvertor makes the rows of the endpoint's objects, or is nil.
func (scope *RequestScope) TableConvertor() rest.TableConvertor {
	if scope.Tables != nil {
		return scope.Tables
	}
	t, _ := scope.Storage.(rest.TableConvertor)
	return t
}

// The five methods of admission.ObjectInterfaces.

// GetObjectCreater implements admission.ObjectInterfaces.
func (scope *RequestScope) GetObjectCreater() runtime.ObjectCreater { return scope.Creater }

// GetObjectTyper implements admission.ObjectInterfaces.
func (scope *RequestScope) GetObjectTyper() runtime.ObjectTyper { return scope.Typer }

// GetObjectDefaulter implements admission.ObjectInterfaces.
func (scope *RequestScope) GetObjectDefaulter() runtime.ObjectDefaulter { return scope.Defaulter }

// GetObjectConvertor implements admission.ObjectInterfaces.
func (scope *RequestScope) GetObjectConvertor() runtime.ObjectConvertor { return scope.Convertor }

// GetEquivalentResourceMapper implements admission.ObjectInterfaces.
func (scope *RequestScope) GetEquivalentResourceMapper() runtime.EquivalentResourceMapper {
	return scope.EquivalentResourceMapper
}

func (scope *RequestScope) acceptsGroupVersion(gv schema.GroupVersion) bool {
	if a, ok := scope.Storage.(rest.GroupVersionAcceptor); ok {
		return a.AcceptsGroupVersion(gv)
	}
	return gv == scope.Kind.GroupVersion()
}

// SelectableFields is what a selector may ask of obj in the endpoint's version.
func (scope *RequestScope) SelectableFields(obj runtime.Object) (map[string]string, error) {
	_, f, err := scope.GetAttrs(obj)
	return f, err
}

var accessor = meta.NewAccessor()

var errEmptyName = apierrors.NewBadRequest("name must be provided")

func objectName(obj runtime.Object) (namespace, name string, err error) {
	if name, err = accessor.Name(obj); err != nil {
		return "", "", err
	}
	if name == "" {
		return "", "", errEmptyName
	}
	namespace, err = accessor.Namespace(obj)
	return namespace, name, err
}

// decodeOptions fills options from a URL's query. A query that does not parse is read as far as it does, as net/http
// does.
func decodeOptions(query string, options runtime.Object) error {
	if query == "" {
		return nil
	}
	values, _ := url.ParseQuery(query)
	if err := metainternalversionscheme.ParameterCodec.DecodeParameters(values,
		metav1.SchemeGroupVersion, options); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return nil
}

// MethodNotSupported is the answer to a verb that the storage lacks.
func (scope *RequestScope) MethodNotSupported(verb string) error {
	return apierrors.NewMethodNotSupported(scope.Resource.GroupResource(), verb)
}

// HasVerb says whether discovery lists verb for the endpoint.
func (scope *RequestScope) HasVerb(verb string) bool {
	return slices.Contains(scope.APIResource.GetVerbs(), verb)
}

func (scope *RequestScope) String() string {
	if scope.Subresource != "" {
		return fmt.Sprintf("%s/%s", scope.Resource, scope.Subresource)
	}
	return scope.Resource.String()
}
