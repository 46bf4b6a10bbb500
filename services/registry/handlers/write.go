package handlers

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/warnings"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/managed"
)

// timeout bounds every write except deletecollection, as kube-apiserver's requestTimeoutUpperBound does.
const timeout = 34 * time.Second

// writeOperation is the state of a running write.
type writeOperation struct {
	*RequestScope
	req             *registryv1.WriteRequest
	user            user.Info
	admit           admission.Interface
	remoteAdmission *remoteAdmission
	auditContext    *auditContext
}

// Write runs a write. ctx must carry the user and the RequestInfo. A write other than deletecollection returns 504
// after 34 s.
func (scope *RequestScope) Write(ctx context.Context, r *registryv1.WriteRequest,
	callbacks Callbacks) (resp *registryv1.ObjectResponse, err error) {
	ctx, warned := warnings.WithRecorder(WithCallbacks(ctx, callbacks))
	ctx, auditCtx := newAuditContext(ctx, r.AuditLevel)
	remote := &remoteAdmission{
		callbacks:       callbacks,
		scope:           scope,
		admit:           r.Admit,
		lifecycle:       r.NamespaceLifecycleOnly,
		validate:        r.Validate,
		validateInAdmit: r.ValidateInAdmit,
	}
	w := &writeOperation{
		RequestScope:    scope,
		req:             r,
		user:            identity.User(r.User),
		remoteAdmission: remote,
		auditContext:    auditCtx,
		admit:           managed.Validating{Interface: remote},
	}
	if scope.Terminating != nil && scope.Terminating() && (r.Verb == "create" || r.Verb == "patch") {
		w.admit = terminatingAdmission{w.admit}
	}
	if r.Verb != "deletecollection" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	ctx, span := telemetry.StartSpan(ctx, spanNames[r.Verb])
	defer span.End()
	switch r.Verb {
	case "create":
		resp, err = w.create(ctx)
	case "update":
		resp, err = w.update(ctx)
	case "patch":
		resp, err = w.patch(ctx)
	case "delete":
		resp, err = w.delete(ctx)
	case "deletecollection":
		resp, err = w.deleteCollection(ctx)
	default:
		err = scope.MethodNotSupported(r.Verb)
	}
	if err != nil {
		return nil, rpc.WithAuditContext(rpc.WithWarnings(err, warned.List()), auditCtx.finish())
	}
	resp.Warnings, resp.Audit = warned.List(), auditCtx.finish()
	return resp, nil
}

// spanNames maps each verb to the name of its span in kube-apiserver.
var spanNames = map[string]string{
	"create":           "Create",
	"update":           "Update",
	"patch":            "Patch",
	"delete":           "Delete",
	"deletecollection": "DeleteCollection",
}

// encodeResult encodes the result of a write, and records it for the audit event if it is a Status.
func (w *writeOperation) encodeResult(
	ctx context.Context,
	code int,
	result runtime.Object,
) (*registryv1.ObjectResponse, error) {
	w.auditContext.recordStatus(result)
	return w.encodeResponse(ctx, w.req.Output, w.req.Query, code, result)
}

// finish calls store and maps its result as upstream does (k8s.io/apiserver/pkg/endpoints/handlers/finisher). Upstream
// calls store on a new goroutine. finish calls it on the caller's goroutine, because store ends with ctx and a new
// goroutine's stack would have to grow.
func finish(ctx context.Context, store func() (runtime.Object, error)) (runtime.Object, error) {
	telemetry.AddSpanEvent(ctx, "About to store object in database", nil)
	result, err := store()
	telemetry.AddSpanEvent(ctx, "Write to database call completed", err)
	if err != nil && ctx.Err() != nil {
		return nil, apierrors.NewTimeoutError(
			fmt.Sprintf("request did not complete within requested timeout - %s", ctx.Err()), 0)
	}
	if s, ok := result.(*metav1.Status); ok && err == nil && s.Status != metav1.StatusSuccess {
		return nil, apierrors.FromObject(s)
	}
	return result, err
}

// decodeBody decodes the request's object into the hub version and applies fieldValidation.
func (w *writeOperation) decodeBody(ctx context.Context, fieldValidation string,
	original runtime.Object) (runtime.Object, error) {
	info, err := negotiation.NegotiateInputSerializerForMediaType(w.req.ContentType, false, w.Serializer)
	if err != nil {
		return nil, err
	}
	directive := directiveOf(fieldValidation)
	s := info.Serializer
	if directive != metav1.FieldValidationIgnore {
		s = info.StrictSerializer
	}
	kind := w.Kind
	obj, gvk, err := w.Serializer.DecoderToVersion(s, w.HubGroupVersion()).Decode(w.req.Body, &kind, original)
	if err != nil {
		strict, ok := runtime.AsStrictDecodingError(err)
		if !ok || obj == nil || directive != metav1.FieldValidationWarn {
			return nil, w.decodeError(err, original, gvk)
		}
		warnStrict(ctx, strict.Errors())
	}
	if gv := gvk.GroupVersion(); !w.acceptsGroupVersion(gv) {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the API version in the data (%s) does not match the "+
			"expected API version (%s)", gv, w.Kind.GroupVersion()))
	}
	w.auditContext.recordRequest(ctx, obj, gvk.GroupVersion(), w.Serializer)
	return obj, nil
}

func directiveOf(d string) string {
	if d == "" {
		return metav1.FieldValidationWarn
	}
	return d
}

// attributes returns the attributes that admission reviews. The namespace of a Namespace is its own name, as in its
// path (k8s.io/apiserver/pkg/endpoints/request, RequestInfoFactory).
func (w *writeOperation) attributes(obj, old runtime.Object, name string, op admission.Operation, opts runtime.Object,
	dryRun []string) admission.Attributes {
	namespace := w.req.Namespace
	if namespace == "" && w.Resource == namespaces {
		namespace = name
	}
	return admission.NewAttributesRecord(obj, old, w.Kind, namespace, name, w.Resource, w.Subresource, op, opts,
		dryrun.IsDryRun(dryRun), w.user)
}

func invalidOptions(kind string, errs fieldErrors) error {
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: kind}, "", errs)
}

// create stores a new object, as k8s.io/apiserver/pkg/endpoints/handlers/create.go does.
func (w *writeOperation) create(ctx context.Context) (*registryv1.ObjectResponse, error) {
	creater, named := w.creater()
	switch {
	case creater == nil:
		return nil, w.MethodNotSupported("create")
	case named && w.req.Name == "":
		return nil, errEmptyName
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
	name := ""
	if named {
		name = w.req.Name
	} else {
		_, name, _ = objectName(obj)
	}
	if w.req.Namespace == "" && w.Resource == namespaces {
		w.req.Namespace = name
	}
	ctx = request.WithNamespace(ctx, w.req.Namespace)
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

func (w *writeOperation) update(ctx context.Context) (*registryv1.ObjectResponse, error) {
	updater, ok := w.Storage.(rest.Updater)
	if !ok {
		return nil, w.MethodNotSupported("update")
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
			return w.FieldManager.UpdateNoErrors(
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

// mutate runs the mutating phase of an update, or of a create if no object exists yet.
func (w *writeOperation) mutate(ctx context.Context, obj, old runtime.Object, create,
	update runtime.Object, dryRun []string) error {
	m, ok := w.admit.(admission.MutationInterface)
	if !ok {
		return nil
	}
	exists, err := hasUID(old)
	if err != nil {
		return fmt.Errorf("unexpected error when extracting UID from oldObj: %v", err.Error())
	}
	if !exists {
		if !m.Handles(admission.Create) {
			return nil
		}
		return m.Admit(ctx, w.attributes(obj, nil, w.req.Name, admission.Create, create, dryRun), w)
	}
	if !m.Handles(admission.Update) {
		return nil
	}
	return m.Admit(ctx, w.attributes(obj, old, w.req.Name, admission.Update, update, dryRun), w)
}

// validateCreate returns a validation that authorizes create first. An update or apply of a missing object requires
// that permission.
func (w *writeOperation) validateCreate(validate rest.ValidateObjectFunc) rest.ValidateObjectFunc {
	attrs := authorizer.AttributesRecord{
		User:            w.user,
		ResourceRequest: true,
		Path:            w.req.Path,
		Verb:            "create",
		APIGroup:        w.Resource.Group,
		APIVersion:      w.Resource.Version,
		Resource:        w.Resource.Resource,
		Subresource:     w.Subresource,
		Namespace:       w.req.Namespace,
		Name:            w.req.Name,
	}
	var decision authorizer.Decision
	var reason string
	var err error
	var once sync.Once
	return func(ctx context.Context, obj runtime.Object) error {
		once.Do(func() { decision, reason, err = Authorizer{}.Authorize(ctx, attrs) })
		if decision == authorizer.DecisionAllow {
			return validate(ctx, obj)
		}
		if err != nil {
			return apierrors.NewInternalError(err)
		}
		return responsewriters.ForbiddenStatusError(attrs, reason)
	}
}

func createOptions(dryRun []string, manager, fieldValidation string) *metav1.CreateOptions {
	o := &metav1.CreateOptions{DryRun: dryRun, FieldManager: manager, FieldValidation: fieldValidation}
	o.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("CreateOptions"))
	return o
}
