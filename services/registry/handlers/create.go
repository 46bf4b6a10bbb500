package handlers

import (
	"context"
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// create stores a new object, as k8s.io/apiserver/pkg/endpoints/handlers/create.go does.
func (w *writeOperation) create(ctx context.Context) (*registryv1.ObjectResponse, error) {
	creater, named := w.creater()
	switch {
	case creater == nil:
		return nil, w.methodNotSupported("create")
	case named && w.req.Name == "":
		return nil, errEmptyName
	}
	if _, err := negotiation.NegotiateInputSerializerForMediaType(w.req.ContentType, false, w.Serializer); err != nil {
		return nil, err
	}
	opts := &metav1.CreateOptions{}
	if err := decodeOptions(w.req.Query, opts); err != nil {
		return nil, err
	}
	if errs := validation.ValidateCreateOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("CreateOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("CreateOptions"))
	obj, err := w.decodeBody(ctx, opts.FieldValidation, creater.New())
	if err != nil {
		return nil, err
	}
	name := w.req.Name // for a custom resource, a path with a name also creates
	if name == "" {
		_, name, _ = objectName(obj)
	}
	ctx = request.WithNamespace(ctx, w.attributesNamespace(name))
	if err := w.prepareNew(obj); err != nil {
		return nil, err
	}
	dedupOwnerReferences(ctx, obj, false)
	result, err := finish(ctx, func() (runtime.Object, error) {
		return w.storeNew(ctx, creater, name, obj, opts)
	})
	if err != nil {
		return nil, err
	}
	if s, ok := result.(*metav1.Status); ok && s.Code == 0 {
		s.Code = http.StatusCreated
	}
	return w.encodeResult(ctx, http.StatusCreated, result)
}

// prepareNew clears the system fields of a new object's metadata, and sets its namespace.
func (w *writeOperation) prepareNew(obj runtime.Object) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil // an object without metadata
	}
	preserve := false
	if p, ok := w.Storage.(rest.SubresourceObjectMetaPreserver); ok && w.Subresource != "" {
		preserve = p.PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate()
	}
	if !preserve {
		rest.WipeObjectMetaSystemFields(m)
	}
	return w.matchNamespace(m)
}

// matchNamespace sets an object's namespace to the request's. It returns an error if the object has another namespace.
func (w *writeOperation) matchNamespace(m metav1.Object) error {
	expected := rest.ExpectedNamespaceForResource(w.req.Namespace, w.Resource)
	return rest.EnsureObjectNamespaceMatchesRequestNamespace(expected, m)
}

// storeNew admits and stores a new object.
func (w *writeOperation) storeNew(ctx context.Context, creater rest.NamedCreater, name string, obj runtime.Object,
	opts *metav1.CreateOptions) (runtime.Object, error) {
	obj, err := w.FieldManager.Create(func() (runtime.Object, error) {
		return w.Creater.New(w.Kind)
	}, obj, managerOrUserAgent(opts.FieldManager, w.req.UserAgent))
	if err != nil {
		return nil, fmt.Errorf("failed to create new object (Create for %v): %v", w.Kind, err)
	}
	attrs := w.attributes(obj, nil, name, admission.Create, opts, opts.DryRun)
	if m, ok := w.admit.(admission.MutationInterface); ok && m.Handles(admission.Create) {
		if err := m.Admit(ctx, attrs, w); err != nil {
			return nil, err
		}
	}
	dedupOwnerReferences(ctx, obj, true)
	return retrySmaller(func() (runtime.Object, error) {
		return creater.Create(ctx, name, obj, rest.AdmissionToValidateObjectFunc(w.admit, attrs, w), opts)
	}, obj, func() {})
}

// retrySmaller calls store. If the object is too large, retrySmaller removes its managedFields, calls onRetry, and
// calls store again.
func retrySmaller(store func() (runtime.Object, error), obj runtime.Object, onRetry func()) (runtime.Object, error) {
	result, err := store()
	if !isTooLarge(err) {
		return result, err
	}
	m, merr := meta.Accessor(obj)
	if merr != nil {
		return result, err
	}
	m.SetManagedFields(nil)
	onRetry()
	return store()
}

var namespaces = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}

// creater returns the storage's creater, and whether the URL contains the object's name.
func (w *writeOperation) creater() (rest.NamedCreater, bool) {
	switch s := w.Storage.(type) {
	case rest.NamedCreater:
		return s, true
	case rest.Creater:
		return unnamedCreater{s}, false
	}
	return nil, false
}

type unnamedCreater struct{ rest.Creater }

func (u unnamedCreater) Create(ctx context.Context, _ string, obj runtime.Object, v rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	return u.Creater.Create(ctx, obj, v, o)
}

func createOptions(dryRun []string, manager, fieldValidation string) *metav1.CreateOptions {
	o := &metav1.CreateOptions{DryRun: dryRun, FieldManager: manager, FieldValidation: fieldValidation}
	o.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("CreateOptions"))
	return o
}
