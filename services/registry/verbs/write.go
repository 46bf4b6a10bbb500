package verbs

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

// timeout bounds every write but deletecollection, as kube-apiserver's requestTimeoutUpperBound.
const timeout = 34 * time.Second

// call is one write on its way.
type call struct {
	*Endpoint
	req   *registryv1.WriteRequest
	user  user.Info
	admit admission.Interface
	gated *gateAdmission
	trail *trail
}

// Write runs one write. ctx carries the user, the RequestInfo and the Gate.
func (e *Endpoint) Write(ctx context.Context, r *registryv1.WriteRequest,
	gate Gate) (resp *registryv1.ObjectResponse, err error) {
	ctx, warned := warnings.WithRecorder(WithGate(ctx, gate))
	ctx, trail := recordTrail(ctx, r.AuditLevel)
	gated := &gateAdmission{
		gate:      gate,
		endpoint:  e,
		admit:     r.Admit,
		lifecycle: r.NamespaceLifecycleOnly,
		validate:  r.Validate,
		atOnce:    r.ValidateInAdmit,
	}
	c := &call{
		Endpoint: e,
		req:      r,
		user:     identity.User(r.User),
		gated:    gated,
		trail:    trail,
		admit:    managed.Validating{Interface: gated},
	}
	if e.Terminating != nil && e.Terminating() && (r.Verb == "create" || r.Verb == "patch") {
		c.admit = noCreates{c.admit}
	}
	if r.Verb != "deletecollection" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	ctx, span := telemetry.StartSpan(ctx, steps[r.Verb])
	defer span.End()
	switch r.Verb {
	case "create":
		resp, err = c.create(ctx)
	case "update":
		resp, err = c.update(ctx)
	case "patch":
		resp, err = c.patch(ctx)
	case "delete":
		resp, err = c.delete(ctx)
	case "deletecollection":
		resp, err = c.deleteCollection(ctx)
	default:
		err = e.MethodNotSupported(r.Verb)
	}
	if err != nil {
		return nil, rpc.WithAuditContext(rpc.WithWarnings(err, warned.List()), trail.end())
	}
	resp.Warnings, resp.Audit = warned.List(), trail.end()
	return resp, nil
}

// steps are the verbs' spans, by kube-apiserver's names.
var steps = map[string]string{
	"create":           "Create",
	"update":           "Update",
	"patch":            "Patch",
	"delete":           "Delete",
	"deletecollection": "DeleteCollection",
}

// answer encodes what a write has made of its object.
func (c *call) answer(ctx context.Context, code int, result runtime.Object) (*registryv1.ObjectResponse, error) {
	c.trail.answered(result)
	return c.respond(ctx, c.req.Output, c.req.Query, code, result)
}

// finish runs what stores an object, for as long as the request has, and answers as upstream does
// (k8s.io/apiserver/pkg/endpoints/handlers/finisher), but on its own goroutine: whatever waits in it heeds ctx, and
// another goroutine's stack would have to grow.
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

// decodeBody reads the request's object into the hub version and applies fieldValidation.
func (c *call) decodeBody(ctx context.Context, fieldValidation string,
	original runtime.Object) (runtime.Object, error) {
	info, err := negotiation.NegotiateInputSerializerForMediaType(c.req.ContentType, false, c.Serializer)
	if err != nil {
		return nil, err
	}
	directive := directiveOf(fieldValidation)
	s := info.Serializer
	if directive != metav1.FieldValidationIgnore {
		s = info.StrictSerializer
	}
	kind := c.Kind
	obj, gvk, err := c.Serializer.DecoderToVersion(s, c.Hub()).Decode(c.req.Body, &kind, original)
	if err != nil {
		strict, ok := runtime.AsStrictDecodingError(err)
		if !ok || obj == nil || directive != metav1.FieldValidationWarn {
			return nil, c.decodeError(err, original, gvk)
		}
		warnStrict(ctx, strict.Errors())
	}
	if gv := gvk.GroupVersion(); !c.acceptsGroupVersion(gv) {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the API version in the data (%s) does not match the "+
			"expected API version (%s)", gv, c.Kind.GroupVersion()))
	}
	c.trail.requested(ctx, obj, gvk.GroupVersion(), c.Serializer)
	return obj, nil
}

func directiveOf(d string) string {
	if d == "" {
		return metav1.FieldValidationWarn
	}
	return d
}

// attributes are what admission is asked about. A namespace is in itself, as its path says
// (k8s.io/apiserver/pkg/endpoints/request, RequestInfoFactory).
func (c *call) attributes(obj, old runtime.Object, name string, op admission.Operation, opts runtime.Object,
	dryRun []string) admission.Attributes {
	namespace := c.req.Namespace
	if namespace == "" && c.Resource == namespaces {
		namespace = name
	}
	return admission.NewAttributesRecord(obj, old, c.Kind, namespace, name, c.Resource, c.Subresource, op, opts,
		dryrun.IsDryRun(dryRun), c.user)
}

func invalidOptions(kind string, errs fieldErrors) error {
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: kind}, "", errs)
}

// create follows k8s.io/apiserver/pkg/endpoints/handlers/create.go.
func (c *call) create(ctx context.Context) (*registryv1.ObjectResponse, error) {
	creater, named := c.creater()
	switch {
	case creater == nil:
		return nil, c.MethodNotSupported("create")
	case named && c.req.Name == "":
		return nil, errEmptyName
	}
	opts := &metav1.CreateOptions{}
	if err := decodeOptions(c.req.Query, opts); err != nil {
		return nil, err
	}
	if errs := validation.ValidateCreateOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("CreateOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("CreateOptions"))
	obj, err := c.decodeBody(ctx, opts.FieldValidation, creater.New())
	if err != nil {
		return nil, err
	}
	name := ""
	if named {
		name = c.req.Name
	} else {
		_, name, _ = objectName(obj)
	}
	if c.req.Namespace == "" && c.Resource == namespaces {
		c.req.Namespace = name
	}
	ctx = request.WithNamespace(ctx, c.req.Namespace)
	if err := c.prepareNew(obj); err != nil {
		return nil, err
	}
	dedupOwnerReferences(ctx, obj, false)
	result, err := finish(ctx, func() (runtime.Object, error) {
		return c.storeNew(ctx, creater, name, obj, opts)
	})
	if err != nil {
		return nil, err
	}
	if s, ok := result.(*metav1.Status); ok && s.Code == 0 {
		s.Code = http.StatusCreated
	}
	return c.answer(ctx, http.StatusCreated, result)
}

// prepareNew takes from a new object's metadata what is the server's to say.
func (c *call) prepareNew(obj runtime.Object) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil // it has none
	}
	keep := false
	if p, ok := c.Storage.(rest.SubresourceObjectMetaPreserver); ok && c.Subresource != "" {
		keep = p.PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate()
	}
	if !keep {
		rest.WipeObjectMetaSystemFields(m)
	}
	return c.matchNamespace(m)
}

// matchNamespace gives an object its request's namespace, and refuses one that has another.
func (c *call) matchNamespace(m metav1.Object) error {
	expected := rest.ExpectedNamespaceForResource(c.req.Namespace, c.Resource)
	return rest.EnsureObjectNamespaceMatchesRequestNamespace(expected, m)
}

// storeNew admits a new object and stores it.
func (c *call) storeNew(ctx context.Context, creater rest.NamedCreater, name string, obj runtime.Object,
	opts *metav1.CreateOptions) (runtime.Object, error) {
	obj, err := c.FieldManager.Create(func() (runtime.Object, error) {
		return c.Creater.New(c.Kind)
	}, obj, manager(opts.FieldManager, c.req.UserAgent))
	if err != nil {
		return nil, fmt.Errorf("failed to create new object (Create for %v): %v", c.Kind, err)
	}
	attrs := c.attributes(obj, nil, name, admission.Create, opts, opts.DryRun)
	if m, ok := c.admit.(admission.MutationInterface); ok && m.Handles(admission.Create) {
		if err := m.Admit(ctx, attrs, c); err != nil {
			return nil, err
		}
	}
	dedupOwnerReferences(ctx, obj, true)
	return orSmaller(func() (runtime.Object, error) {
		return creater.Create(ctx, name, obj, rest.AdmissionToValidateObjectFunc(c.admit, attrs, c), opts)
	}, obj, func() {})
}

// orSmaller stores an object and, where it is too large, once more without its managedFields, which can be done
// without. smaller is called between the two.
func orSmaller(store func() (runtime.Object, error), obj runtime.Object, smaller func()) (runtime.Object, error) {
	result, err := store()
	if !isTooLarge(err) {
		return result, err
	}
	m, merr := meta.Accessor(obj)
	if merr != nil {
		return result, err
	}
	m.SetManagedFields(nil)
	smaller()
	return store()
}

var namespaces = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}

// creater is the storage's creater, and whether the name comes from the URL.
func (c *call) creater() (rest.NamedCreater, bool) {
	switch s := c.Storage.(type) {
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

func (c *call) update(ctx context.Context) (*registryv1.ObjectResponse, error) {
	updater, ok := c.Storage.(rest.Updater)
	if !ok {
		return nil, c.MethodNotSupported("update")
	}
	name := c.req.Name
	if name == "" {
		return nil, errEmptyName
	}
	ctx = request.WithNamespace(ctx, c.req.Namespace)
	opts, err := c.updateOptions()
	if err != nil {
		return nil, err
	}
	obj, err := c.updatedBody(ctx, opts, updater.New())
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
			return c.FieldManager.UpdateNoErrors(live, newObj, manager(opts.FieldManager, c.req.UserAgent)), nil
		},
		func(ctx context.Context, newObj, old runtime.Object) (runtime.Object, error) {
			return newObj, c.mutate(ctx, newObj, old, createOpts, opts, opts.DryRun)
		},
		func(ctx context.Context, newObj, _ runtime.Object) (runtime.Object, error) {
			dedupOwnerReferences(ctx, newObj, true)
			return newObj, nil
		},
	}
	created := false
	store := func() (result runtime.Object, err error) {
		result, created, err = updater.Update(ctx, name, rest.DefaultUpdatedObjectInfo(obj, transformers...),
			c.validateCreate(rest.AdmissionToValidateObjectFunc(c.admit,
				c.attributes(nil, nil, name, admission.Create, createOpts, opts.DryRun), c)),
			rest.AdmissionToValidateObjectUpdateFunc(c.admit,
				c.attributes(nil, nil, name, admission.Update, opts, opts.DryRun), c),
			false, opts)
		return result, err
	}
	dedupOwnerReferences(ctx, obj, false)
	result, err := finish(ctx, func() (runtime.Object, error) {
		return orSmaller(store, obj, func() { trackManagers = false })
	})
	if err != nil {
		return nil, err
	}
	return c.answer(ctx, createdOrOK(created), result)
}

// updateOptions reads an update's options.
func (c *call) updateOptions() (*metav1.UpdateOptions, error) {
	opts := &metav1.UpdateOptions{}
	if err := decodeOptions(c.req.Query, opts); err != nil {
		return nil, err
	}
	if errs := validation.ValidateUpdateOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("UpdateOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("UpdateOptions"))
	return opts, nil
}

// updatedBody reads the object that an update stores, which is to be the one that the path names.
func (c *call) updatedBody(ctx context.Context, opts *metav1.UpdateOptions,
	into runtime.Object) (runtime.Object, error) {
	obj, err := c.decodeBody(ctx, opts.FieldValidation, into)
	if err != nil {
		return nil, err
	}
	if m, err := meta.Accessor(obj); err == nil {
		if err := c.matchNamespace(m); err != nil {
			return nil, err
		}
	}
	return obj, checkName(obj, c.req.Name, c.req.Namespace)
}

func createdOrOK(created bool) int {
	if created {
		return http.StatusCreated
	}
	return http.StatusOK
}

// mutate runs the mutating phase of an update, which is a create where nothing is there yet.
func (c *call) mutate(ctx context.Context, obj, old runtime.Object, create,
	update runtime.Object, dryRun []string) error {
	m, ok := c.admit.(admission.MutationInterface)
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
		return m.Admit(ctx, c.attributes(obj, nil, c.req.Name, admission.Create, create, dryRun), c)
	}
	if !m.Handles(admission.Update) {
		return nil
	}
	return m.Admit(ctx, c.attributes(obj, old, c.req.Name, admission.Update, update, dryRun), c)
}

// validateCreate lets an update or apply create the object only where the user may create it.
func (c *call) validateCreate(validate rest.ValidateObjectFunc) rest.ValidateObjectFunc {
	attrs := authorizer.AttributesRecord{
		User:            c.user,
		ResourceRequest: true,
		Path:            c.req.Path,
		Verb:            "create",
		APIGroup:        c.Resource.Group,
		APIVersion:      c.Resource.Version,
		Resource:        c.Resource.Resource,
		Subresource:     c.Subresource,
		Namespace:       c.req.Namespace,
		Name:            c.req.Name,
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
