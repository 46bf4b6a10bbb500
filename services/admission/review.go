package admission

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"watershed.dev/platform/crd"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// Admit implements admissionv1.AdmissionServer.
func (s *Service) Admit(ctx context.Context, r *admissionv1.Review) (*admissionv1.Verdict, error) {
	v, err := s.review(ctx, r, func(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
		if m, ok := s.chain.(admission.MutationInterface); ok && m.Handles(a.GetOperation()) {
			return m.Admit(ctx, a, o)
		}
		return nil
	}, true)
	return v, rpc.ToStatus(err)
}

// validate runs the validating phase.
func (s *Service) validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if m, ok := s.chain.(admission.ValidationInterface); ok && m.Handles(a.GetOperation()) {
		return m.Validate(ctx, a, o)
	}
	return nil
}

// objectIndependent are audit annotations that do not depend on the object.
var objectIndependent = []string{"pod-security.kubernetes.io/enforce-policy"}

// validateInAdmit validates the admitted object. ok is true only if validation has no error, warning or annotation
// about the object; annotations then has the others. In every other case Validate decides about the object to be
// stored, which may be different or invalid.
func (s *Service) validateInAdmit(ctx context.Context, r *admissionv1.Review, a admission.Attributes,
	o admission.ObjectInterfaces) (annotations map[string]string, ok bool) {
	defer func() {
		if p := recover(); p != nil {
			recovery.Observe("early validation", p) // Validate runs the plugin again
			annotations, ok = nil, false
		}
	}()
	ctx, warned := warnings.WithRecorder(ctx)
	ctx, auditContext := withAuditContext(ctx, r.AuditLevel)
	if s.validate(ctx, a, o) != nil || len(warned.List()) > 0 {
		return nil, false
	}
	annotations = auditContext.GetEventAnnotations()
	for k := range annotations {
		if !slices.Contains(objectIndependent, k) {
			return nil, false
		}
	}
	return annotations, true
}

// Validate implements admissionv1.AdmissionServer.
func (s *Service) Validate(ctx context.Context, r *admissionv1.Review) (*admissionv1.Verdict, error) {
	v, err := s.review(ctx, r, s.validate, false)
	return v, rpc.ToStatus(err)
}

type phase func(context.Context, admission.Attributes, admission.ObjectInterfaces) error

func (s *Service) review(ctx context.Context, r *admissionv1.Review, run phase,
	mutates bool) (*admissionv1.Verdict, error) {
	if err := s.checkFresh(); err != nil && !fromControlPlane(r) { // stale policies decide nothing
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	c, err := s.codecFor(ctx, r)
	if err != nil {
		return nil, err
	}
	obj, err := c.decode(r.Object)
	if err != nil {
		return nil, err
	}
	old, err := c.decode(r.OldObject)
	if err != nil {
		return nil, err
	}
	opts, err := optionsOf(r.Operation, r.Options)
	if err != nil {
		return nil, err
	}
	u := identity.User(r.User)
	newAttributes := func() admission.Attributes {
		return admission.NewAttributesRecord(obj, old, c.kind, r.Namespace, r.Name,
			schema.GroupVersionResource{
				Group:    r.Resource.Group,
				Version:  r.Resource.Version,
				Resource: r.Resource.Resource,
			}, r.Resource.Subresource,
			operations[r.Operation], opts, r.DryRun, u)
	}
	ctx, warned := warnings.WithRecorder(withRequestInfo(ctx, r, u))
	ctx, auditContext := withAuditContext(request.WithLatencyTrackers(s.hooks.withBudget(ctx)), r.AuditLevel)
	if err := run(ctx, newAttributes(), c.interfaces); err != nil {
		// As in kube-apiserver, a wrapped API error is not the response.
		if _, ok := err.(apierrors.APIStatus); !ok { //nolint:errorlint // for that reason
			err = rpc.ToAPIStatus(err)
		}
		err = rpc.WithAuditContext(err, &commonv1.AuditContext{
			Annotations: auditContext.GetEventAnnotations(),
			Webhooks:    webhookLatency(ctx),
		})
		return nil, rpc.WithWarnings(err, warned.List())
	}
	v := &admissionv1.Verdict{
		Warnings:         warned.List(),
		AuditAnnotations: auditContext.GetEventAnnotations(),
		Webhooks:         webhookLatency(ctx),
	}
	if mutates && obj != nil {
		after, err := c.encode(obj)
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(after, r.Object) {
			v.Object = after
		}
	}
	if mutates && r.Validate {
		v.ValidatedAnnotations, v.Validated = s.validateInAdmit(ctx, r, newAttributes(), c.interfaces)
	}
	return v, nil
}

// webhookLatency returns the time that the webhooks of a phase took, or nil if it called none.
func webhookLatency(ctx context.Context) *commonv1.WebhookLatency {
	trackers, ok := request.LatencyTrackersFrom(ctx)
	if !ok {
		return nil
	}
	mutating, validating := trackers.MutatingWebhookTracker.GetLatency(), trackers.ValidatingWebhookTracker.GetLatency()
	if mutating == 0 && validating == 0 {
		return nil
	}
	return &commonv1.WebhookLatency{
		MutatingNanoseconds:   mutating.Nanoseconds(),
		ValidatingNanoseconds: validating.Nanoseconds(),
	}
}

// withAuditContext gives plugins an audit context of the request's audit level.
func withAuditContext(ctx context.Context, level commonv1.AuditLevel) (context.Context, *audit.AuditContext) {
	ctx = audit.WithAuditContext(ctx)
	auditContext := audit.AuditContextFrom(ctx)
	// the audit context is new, so Init cannot fail
	_ = auditContext.Init(audit.RequestAuditConfig{Level: auditLevels[level]}, nil)
	return ctx, auditContext
}

var auditLevels = map[commonv1.AuditLevel]auditinternal.Level{
	commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED:      auditinternal.LevelNone,
	commonv1.AuditLevel_AUDIT_LEVEL_METADATA:         auditinternal.LevelMetadata,
	commonv1.AuditLevel_AUDIT_LEVEL_REQUEST:          auditinternal.LevelRequest,
	commonv1.AuditLevel_AUDIT_LEVEL_REQUEST_RESPONSE: auditinternal.LevelRequestResponse,
}

// withRequestInfo adds the reviewed request's user and info to ctx, as plugins read them.
func withRequestInfo(ctx context.Context, r *admissionv1.Review, u user.Info) context.Context {
	ctx = request.WithUser(request.WithNamespace(ctx, r.Namespace), u)
	return request.WithRequestInfo(ctx, &request.RequestInfo{
		IsResourceRequest: true,
		Verb:              verbs[r.Operation],
		APIGroup:          r.Resource.Group,
		APIVersion:        r.Resource.Version,
		Resource:          r.Resource.Resource,
		Subresource:       r.Resource.Subresource,
		Namespace:         r.Namespace,
		Name:              r.Name,
	})
}

// fromControlPlane reports whether the write is by a system service. Such writes continue, so that the control plane
// can recover. Writes of administrators and other users wait.
func fromControlPlane(r *admissionv1.Review) bool {
	return slices.Contains(r.GetUser().GetGroups(), identity.ServicesGroup)
}

var operations = map[admissionv1.Operation]admission.Operation{
	admissionv1.Operation_OPERATION_CREATE:  admission.Create,
	admissionv1.Operation_OPERATION_UPDATE:  admission.Update,
	admissionv1.Operation_OPERATION_DELETE:  admission.Delete,
	admissionv1.Operation_OPERATION_CONNECT: admission.Connect,
}

var verbs = map[admissionv1.Operation]string{
	admissionv1.Operation_OPERATION_CREATE: "create", admissionv1.Operation_OPERATION_UPDATE: "update",
	admissionv1.Operation_OPERATION_DELETE: "delete", admissionv1.Operation_OPERATION_CONNECT: "connect",
}

// codec decodes and encodes a review's objects.
type codec struct {
	kind schema.GroupVersionKind
	// custom is true for custom resources. Their objects may have any fields, also the fields of a list.
	custom     bool
	decoder    runtime.Decoder
	encoder    runtime.Encoder
	interfaces admission.ObjectInterfaces
}

var schemes = []struct {
	scheme *runtime.Scheme
	codecs runtime.NegotiatedSerializer
}{{legacyscheme.Scheme, legacyscheme.Codecs}, {apiextensionsapiserver.Scheme, apiextensionsapiserver.Codecs},
	{aggregatorscheme.Scheme, aggregatorscheme.Codecs}}

func (s *Service) codecFor(ctx context.Context, r *admissionv1.Review) (*codec, error) {
	c := &codec{kind: schema.GroupVersionKind{Group: r.Kind.Group, Version: r.Kind.Version, Kind: r.Kind.Kind}}
	for _, entry := range schemes {
		// A custom resource may have the kind of a Go type whose API is not enabled.
		if r.Custom || !entry.scheme.Recognizes(c.kind) {
			continue
		}
		info, ok := runtime.SerializerInfoForMediaType(entry.codecs.SupportedMediaTypes(), r.MediaType)
		if !ok {
			return nil, apierrors.NewInternalError(errors.New("no serializer for " + r.MediaType))
		}
		hub := schema.GroupVersion{Group: c.kind.Group, Version: runtime.APIVersionInternal}
		c.decoder, c.encoder = entry.codecs.DecoderToVersion(info.Serializer,
			hub), entry.codecs.EncoderForVersion(info.Serializer, c.kind.GroupVersion())
		c.interfaces = equivalent{admission.NewObjectInterfacesFromScheme(entry.scheme), equivalents(r)}
		return c, nil
	}
	c.custom, c.decoder, c.encoder = true, unstructured.UnstructuredJSONScheme, unstructured.UnstructuredJSONScheme
	var err error
	c.interfaces, err = s.crds.interfaces(ctx, r.Resource.Resource+"."+r.Resource.Group, c.kind.Version)
	return c, err
}

// equivalent is a scheme's interfaces with the equivalent resources of the reviewed resource.
type equivalent struct {
	admission.ObjectInterfaces
	mapper runtime.EquivalentResourceMapper
}

// GetEquivalentResourceMapper implements admission.ObjectInterfaces.
func (e equivalent) GetEquivalentResourceMapper() runtime.EquivalentResourceMapper { return e.mapper }

// equivalents returns the reviewed resource in every version, as registry sends them.
func equivalents(r *admissionv1.Review) runtime.EquivalentResourceMapper {
	m := runtime.NewEquivalentResourceRegistryWithIdentity(func(schema.GroupResource) string { return "the one" })
	add := func(to *commonv1.Resource, k *commonv1.Kind) {
		m.RegisterKindFor(schema.GroupVersionResource{
			Group:    to.GetGroup(),
			Version:  to.GetVersion(),
			Resource: to.GetResource(),
		}, r.Resource.GetSubresource(),
			schema.GroupVersionKind{Group: k.GetGroup(), Version: k.GetVersion(), Kind: k.GetKind()})
	}
	add(r.Resource, r.Kind)
	for _, e := range r.Equivalents {
		add(e.Resource, e.Kind)
	}
	return m
}

func (c *codec) decode(data []byte) (runtime.Object, error) {
	if len(data) == 0 {
		return nil, nil
	}
	var into runtime.Object
	if c.custom {
		into = &unstructured.Unstructured{} // without it, an object with "items" becomes a list
	}
	obj, _, err := c.decoder.Decode(data, &c.kind, into)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	return obj, nil
}

func (c *codec) encode(obj runtime.Object) ([]byte, error) {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return crd.MarshalJSON(u)
	}
	var b bytes.Buffer
	err := c.encoder.Encode(obj, &b)
	return b.Bytes(), err
}
