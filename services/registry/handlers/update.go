package handlers

import (
	"context"
	"net/http"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func (w *writeOperation) update(ctx context.Context) (*registryv1.ObjectResponse, error) {
	updater, ok := w.Storage.(rest.Updater)
	if !ok {
		return nil, w.methodNotSupported("update")
	}
	name := w.req.Name
	if name == "" {
		return nil, errEmptyName
	}
	ctx = request.WithNamespace(ctx, w.req.Namespace)
	opts, err := w.updateOptions()
	if err != nil {
		return nil, err
	}
	obj, err := w.updatedBody(ctx, opts, updater.New())
	if err != nil {
		return nil, err
	}
	createOpts := createOptions(opts.DryRun, opts.FieldManager, opts.FieldValidation)
	trackManagers := true
	transformers := []rest.TransformFunc{
		func(_ context.Context, newObj, live runtime.Object) (runtime.Object, error) {
			if !trackManagers {
				return newObj, nil
			}
			return w.FieldManager.Update(
				live,
				newObj,
				managerOrUserAgent(opts.FieldManager, w.req.UserAgent),
			), nil
		},
		func(ctx context.Context, newObj, old runtime.Object) (runtime.Object, error) {
			return newObj, w.mutate(ctx, newObj, old, createOpts, opts, opts.DryRun)
		},
		func(ctx context.Context, newObj, _ runtime.Object) (runtime.Object, error) {
			dedupOwnerReferences(ctx, newObj, true)
			return newObj, nil
		},
	}
	created := false
	store := func() (result runtime.Object, err error) {
		result, created, err = updater.Update(ctx, name, rest.DefaultUpdatedObjectInfo(obj, transformers...),
			w.validateCreate(rest.AdmissionToValidateObjectFunc(w.admit,
				w.attributes(nil, nil, name, admission.Create, createOpts, opts.DryRun), w)),
			rest.AdmissionToValidateObjectUpdateFunc(w.admit,
				w.attributes(nil, nil, name, admission.Update, opts, opts.DryRun), w),
			false, opts)
		return result, err
	}
	dedupOwnerReferences(ctx, obj, false)
	result, err := finish(ctx, func() (runtime.Object, error) {
		return retrySmaller(store, obj, func() { trackManagers = false })
	})
	if err != nil {
		return nil, err
	}
	return w.encodeResult(ctx, createdOrOK(created), result)
}

// updateOptions decodes and validates an update's options.
func (w *writeOperation) updateOptions() (*metav1.UpdateOptions, error) {
	opts := &metav1.UpdateOptions{}
	if err := decodeOptions(w.req.Query, opts); err != nil {
		return nil, err
	}
	if errs := validation.ValidateUpdateOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("UpdateOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("UpdateOptions"))
	return opts, nil
}

// updatedBody decodes the object of an update. Its name and namespace must equal the path's.
func (w *writeOperation) updatedBody(ctx context.Context, opts *metav1.UpdateOptions,
	into runtime.Object) (runtime.Object, error) {
	obj, err := w.decodeBody(ctx, opts.FieldValidation, into)
	if err != nil {
		return nil, err
	}
	if m, err := meta.Accessor(obj); err == nil {
		if err := w.matchNamespace(m); err != nil {
			return nil, err
		}
	}
	return obj, checkName(obj, w.req.Name, w.req.Namespace)
}

func createdOrOK(created bool) int {
	if created {
		return http.StatusCreated
	}
	return http.StatusOK
}
