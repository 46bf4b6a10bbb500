// Package handlers implements the verbs of the API over rest.Storage: get, list, create, update, patch, apply, delete,
// deletecollection and connect. Bodies of requests and responses are bytes.
//
// The behaviour is that of k8s.io/apiserver/pkg/endpoints/handlers at 0.36, call by call. There are two differences: no
// HTTP request exists, and admission and authorization go through Callbacks.
//
// The package starts no goroutine: each request runs on the goroutine of its RPC. A RequestScope does not change once
// it is served.
//
// # Review notes
//
//   - Compare a changed function with the upstream function that it copies. Error texts, their order and the warnings
//     must be equal.
//   - A write without Callbacks must fail. Authorizer denies it.
//   - Work in proportion to a list or a body must end with ctx. Quadratic time is not acceptable: comparing each pair
//     of owner references takes minutes for 100,000 references.
//   - Print an object or a patch only for an error. Printing 150,000 keys takes half a second.
package handlers

import (
	"fmt"
	"net/url"

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

// RequestScope serves a resource or subresource in a single version. It corresponds to RequestScope of upstream.
type RequestScope struct {
	Resource    schema.GroupVersionResource
	Subresource string
	// Kind is the kind of a request's body and of the response, in the served version.
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
	// InMemory is the version of decoded objects. Empty means the internal version.
	InMemory schema.GroupVersion
	// Tables makes Table rows. If it is nil, Storage makes them.
	Tables rest.TableConvertor
	// GetAttrs returns the fields of an object that selectors can use. Only scopes of custom resources have it, because
	// their versions can have different fields.
	GetAttrs apistorage.AttrFunc
	// FromStorage converts custom resources from their stored versions to the scope's version.
	FromStorage func(*unstructured.UnstructuredList) (*unstructured.UnstructuredList, error)
	// ResponseCache caches encoded objects. It is set only if the served version is the storage version. If it is nil,
	// as for custom resources, each GET decodes and encodes the object.
	ResponseCache *storage.ResponseCache
	// Terminating reports whether the CRD is being deleted, which forbids creates. It may be nil.
	Terminating func() bool

	// APIResource describes the scope in discovery.
	APIResource *registryv1.APIResource
}

// HubGroupVersion returns the version of decoded objects: InMemory, or the group's internal version.
func (scope *RequestScope) HubGroupVersion() schema.GroupVersion {
	if !scope.InMemory.Empty() {
		return scope.InMemory
	}
	return schema.GroupVersion{Group: scope.Kind.Group, Version: runtime.APIVersionInternal}
}

// TableConvertor returns the convertor that makes Table rows, or nil.
func (scope *RequestScope) TableConvertor() rest.TableConvertor {
	if scope.Tables != nil {
		return scope.Tables
	}
	t, _ := scope.Storage.(rest.TableConvertor)
	return t
}

// The following five methods implement admission.ObjectInterfaces.

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

// SelectableFields returns the fields of obj that selectors can use, in the scope's version. It requires GetAttrs.
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

// decodeOptions decodes a URL's query into options. Like net/http, it ignores pairs that do not parse.
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

// methodNotSupported returns the 405 error for a verb that the storage lacks.
func (scope *RequestScope) methodNotSupported(verb string) error {
	return apierrors.NewMethodNotSupported(scope.Resource.GroupResource(), verb)
}

func (scope *RequestScope) String() string {
	if scope.Subresource != "" {
		return fmt.Sprintf("%s/%s", scope.Resource, scope.Subresource)
	}
	return scope.Resource.String()
}
