package handlers

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
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
	req          *registryv1.WriteRequest
	user         user.Info
	admit        admission.Interface
	auditContext *auditContext
}

// Write runs a write. ctx must carry the user and the RequestInfo. A write other than deletecollection returns 504
// after 34 s.
func (scope *RequestScope) Write(ctx context.Context, r *registryv1.WriteRequest,
	callbacks Callbacks) (resp *registryv1.ObjectResponse, err error) {
	ctx, warned := warnings.WithRecorder(withCallbacks(ctx, callbacks))
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
		RequestScope: scope,
		req:          r,
		user:         identity.User(r.User),
		auditContext: auditCtx,
		admit:        managed.Validating{Interface: remote},
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
		err = scope.methodNotSupported(r.Verb)
	}
	if ofEtcdClient(err) {
		err = rpc.ToAPIStatus(err) // clients receive the text of etcd's client, with gRPC's code
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

// attributes returns the attributes that admission reviews.
func (w *writeOperation) attributes(obj, old runtime.Object, name string, op admission.Operation, opts runtime.Object,
	dryRun []string) admission.Attributes {
	return admission.NewAttributesRecord(obj, old, w.Kind, w.attributesNamespace(name), name, w.Resource, w.Subresource,
		op, opts, dryrun.IsDryRun(dryRun), w.user)
}

// attributesNamespace returns the namespace for admission and authorization. The namespace of a Namespace is its own
// name, as in its path (k8s.io/apiserver/pkg/endpoints/request, RequestInfoFactory).
func (w *writeOperation) attributesNamespace(name string) string {
	if w.req.Namespace == "" && w.Resource == namespaces {
		return name
	}
	return w.req.Namespace
}

func invalidOptions(kind string, errs fieldErrors) error {
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: kind}, "", errs)
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
		Namespace:       w.attributesNamespace(w.req.Name),
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
