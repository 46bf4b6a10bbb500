package routing

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	handlersmetrics "k8s.io/apiserver/pkg/endpoints/handlers/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
)

// write sends a write to registry, serves its callbacks, and writes the response.
func (c *requestContext) write() {
	data, err := body.Read(c.req)
	if err != nil {
		c.fail(err)
		return
	}
	if verb, ok := bodyVerbs[c.info.Verb]; ok {
		handlersmetrics.RecordRequestBodySize(c.req.Context(), c.groupResource(), verb, len(data))
	}
	r := c.writeRequest()
	c.body = data
	r.ContentType, r.Body, r.Output = c.req.Header.Get("Content-Type"), data, c.out
	if !c.needsCallback(r) {
		result, callbackRequired, err := c.writeUnary(r)
		switch {
		case err != nil:
			c.fail(err)
			return
		case !callbackRequired:
			c.writeResponse(result)
			return
		}
	}
	m, err := c.callWithCallbacks(r, c.router.Objects.Write)
	if err != nil {
		c.fail(err)
		return
	}
	c.writeResponse(m.GetResult())
}

// bodyVerbs maps a verb to its label in the metric of request bodies.
var bodyVerbs = map[string]handlersmetrics.RequestBodyVerb{
	"create":           handlersmetrics.Create,
	"update":           handlersmetrics.Update,
	"patch":            handlersmetrics.Patch,
	"delete":           handlersmetrics.Delete,
	"deletecollection": handlersmetrics.DeleteCollection,
}

// reviewGroups are the groups of the reviews, whose content is from authn and authz.
var reviewGroups = []string{"authentication.k8s.io", "authorization.k8s.io"}

// callbackGroups are the groups whose writes mostly need a callback, independent of the admission rules. Roles and
// certificate requests need an authorization check.
var callbackGroups = append([]string{"certificates.k8s.io", "rbac.authorization.k8s.io"}, reviewGroups...)

// verbOperations maps a verb to the admission operations that its write may have.
var verbOperations = map[string][]admissionv1.Operation{
	"create": {admissionv1.Operation_OPERATION_CREATE},
	"update": {admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE},
	"patch":  {admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE},
	"delete": {admissionv1.Operation_OPERATION_DELETE},
}

// needsCallback reports whether registry probably needs a callback for a write.
func (c *requestContext) needsCallback(r *registryv1.WriteRequest) bool {
	ops, ok := verbOperations[r.Verb]
	return !ok || slices.Contains(callbackGroups, c.apiResource.Resource.GetGroup()) ||
		slices.ContainsFunc(ops, func(op admissionv1.Operation) bool {
			return slices.Contains(r.Validate, op) ||
				slices.Contains(r.Admit, op) && !slices.Contains(r.NamespaceLifecycleOnly, op)
		})
}

// writeUnary sends registry a write that probably needs no callback. If callbackRequired is set, the write needs a
// callback, and registry wrote nothing.
func (c *requestContext) writeUnary(
	r *registryv1.WriteRequest,
) (result *registryv1.ObjectResponse, callbackRequired bool, err error) {
	var replica peer.Peer
	reply, err := c.router.Objects.WriteUnary(c.withAffinity(c.req.Context(), r.Namespace, r.Name), r,
		grpc.Peer(&replica))
	switch {
	case err != nil && replica.Addr == nil: // no registry has received the request
		return nil, false, rpc.FromStatus(err)
	case err != nil:
		return nil, false, writeError(r, err)
	}
	if len(reply.Error) > 0 {
		st := &rpcstatus.Status{}
		if err := proto.Unmarshal(reply.Error, st); err != nil {
			return nil, false, err
		}
		return nil, false, rpc.WithAuditContext(rpc.FromStatus(status.ErrorProto(st)), reply.Audit)
	}
	return reply.Result, reply.CallbackRequired, nil
}

// writeError converts the error of a call that a registry may have received, as rpc.FromStatus does. A lost registry
// may have stored the object, and client-go sends a request again if its error has Retry-After. The error therefore has
// none if a second write could have a second effect.
func writeError(r *registryv1.WriteRequest, err error) error {
	converted := rpc.FromStatus(err)
	var api *apierrors.StatusError
	// no API error has this code (rpc.ToStatus)
	if status.Code(err) == codes.Unavailable && !isRepeatable(r) && errors.As(converted, &api) {
		api.ErrStatus.Details = nil
	}
	return converted
}

// isRepeatable reports whether a write may be sent twice. The second may fail, with 404 or 409, and may repeat the
// values of an update, patch or create after another client's write. These may have a worse effect:
//   - A JSON Patch may add an element again, and generateName another object.
//   - A deletion without preconditions, or an eviction, may delete an object that another client has created again.
//   - deletecollection deletes the objects that were created between the two.
func isRepeatable(r *registryv1.WriteRequest) bool {
	mediaType, _, _ := mime.ParseMediaType(r.ContentType)
	switch r.Verb {
	case "create":
		var object metav1.PartialObjectMetadata
		return r.Resource.GetSubresource() == "" && decodeMetadata(mediaType, r.Body, &object) && object.GenerateName == ""
	case "patch":
		return mediaType != string(types.JSONPatchType)
	case "delete":
		var options metav1.DeleteOptions
		if !decodeMetadata(mediaType, r.Body, &options) || options.Preconditions == nil {
			return false
		}
		return options.Preconditions.UID != nil || options.Preconditions.ResourceVersion != nil
	case "deletecollection":
		return false
	}
	return true
}

// decodeMetadata decodes fields of a request's body. It returns false for other media types than JSON and protobuf.
func decodeMetadata(mediaType string, data []byte, into interface{ Unmarshal(protobuf []byte) error }) bool {
	switch mediaType {
	case runtime.ContentTypeJSON:
		return utiljson.Unmarshal(data, into) == nil
	case runtime.ContentTypeProtobuf:
		var envelope runtime.Unknown
		raw, ok := bytes.CutPrefix(data, []byte("k8s\x00"))
		return ok && envelope.Unmarshal(raw) == nil && into.Unmarshal(envelope.Raw) == nil
	}
	return false
}

// withAffinity routes all calls for an object to the same registry replica, because that replica has cached its last
// write and response.
func (c *requestContext) withAffinity(ctx context.Context, namespace, name string) context.Context {
	if name == "" {
		return ctx
	}
	return rpc.WithAffinity(ctx, c.apiResource.StorageResource+"/"+namespace+"/"+name)
}

func (c *requestContext) writeRequest() *registryv1.WriteRequest {
	r := &registryv1.WriteRequest{
		Verb:      c.info.Verb,
		Resource:  c.apiResource.Resource,
		Namespace: c.namespace(),
		Name:      c.info.Name,
		User:      c.user,
		Query:     c.req.URL.RawQuery,
		UserAgent: c.req.UserAgent(),
		Path:      c.req.URL.Path,

		AuditLevel: audit.Level(c.req.Context()),
	}
	if !c.isSelfReview() {
		c.router.AdmissionRules.SetOperations(r)
	}
	return r
}

// isReview reports whether the request is a TokenReview, SubjectAccessReview or rules review. A review stores nothing,
// and its client may cache the answer. Without authn or authz, it therefore fails.
func (c *requestContext) isReview() bool {
	return slices.Contains(reviewGroups, c.apiResource.Resource.GetGroup())
}

// isSelfReview reports whether the request is a SubjectAccessReview that admission creates while it reviews another
// request. Such a review skips admission, because it might recurse without end. kube-apiserver's plugins call its
// authorizer without a request.
func (c *requestContext) isSelfReview() bool {
	return c.user.GetName() == identity.Admission && slices.Contains(c.user.GetGroups(), identity.ServicesGroup) &&
		c.apiResource.Resource.GetGroup() == "authorization.k8s.io" &&
		c.apiResource.Resource.GetResource() == "subjectaccessreviews"
}

// callbackStream is a stream on which registry may send callbacks before its response.
type callbackStream = grpc.BidiStreamingClient[registryv1.WriteCall, registryv1.WriteReply]

// callbackTimeout bounds all callbacks of a write to one object together. It is slightly longer than the write's own
// timeout (services/registry/handlers), so that registry reports the timeout.
const callbackTimeout = 34*time.Second + 100*time.Millisecond

// callWithCallbacks sends a request and serves registry's callbacks until registry responds.
func (c *requestContext) callWithCallbacks(r *registryv1.WriteRequest,
	open func(context.Context, ...grpc.CallOption) (callbackStream, error)) (*registryv1.WriteReply, error) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	streamCtx := ctx // of registry only: the callbacks go to other services
	if r.Verb != "connect" {
		streamCtx = c.withAffinity(ctx, r.Namespace, r.Name)
	}
	stream, err := open(streamCtx)
	if err != nil { // registry has not received the request
		return nil, rpc.FromStatus(err)
	}
	err = stream.Send(&registryv1.WriteCall{Call: &registryv1.WriteCall_Request{Request: r}})
	callbackCtx := ctx
	if verbOperations[r.Verb] != nil {
		var done context.CancelFunc
		callbackCtx, done = context.WithTimeout(ctx, callbackTimeout)
		defer done()
	}
	var auditContext *commonv1.AuditContext
	var undecided error // authz or authn is unavailable: the rejection of the write is no decision
	for err == nil || errors.Is(err, io.EOF) {
		var m *registryv1.WriteReply
		if m, err = stream.Recv(); err != nil {
			break
		}
		if m.Audit != nil { // an error follows
			auditContext = m.Audit
			continue
		}
		if m.GetResult() != nil || m.GetConnection() != nil {
			if trace.SpanContextFromContext(ctx).IsSampled() {
				_, _ = stream.Recv() // receive the end, because a trace shows a cancelled call as failed
			}
			return m, nil
		}
		answer, lost := c.handleCallback(telemetry.WithTraceparent(callbackCtx, m.Traceparent), m)
		if lost != nil && c.isReview() {
			return nil, lost
		}
		if rpc.IsUndecided(lost) {
			undecided = lost
		}
		err = stream.Send(answer)
	}
	refusal := writeError(r, err)
	rejected := apierrors.IsForbidden(refusal) || apierrors.IsInternalError(refusal)
	if undecided != nil && rejected && status.Code(err) != codes.Unavailable { // not of a lost registry
		refusal = undecided
	}
	return nil, rpc.WithAuditContext(refusal, auditContext)
}

// handleCallback sends a callback to its service. A callback that fails rejects the write. The error is that of a call
// to authn or authz, which the result also has.
func (c *requestContext) handleCallback(
	ctx context.Context,
	q *registryv1.WriteReply,
) (*registryv1.WriteCall, error) {
	switch q := q.Reply.(type) {
	case *registryv1.WriteReply_Admission:
		return &registryv1.WriteCall{
			Call: &registryv1.WriteCall_Admission{Admission: c.reviewAdmission(ctx, q.Admission)},
		}, nil
	case *registryv1.WriteReply_Authorization:
		result := &registryv1.AuthorizationResult{}
		var err error
		if result.Decision, err = c.router.Authorizer.Decide(ctx, q.Authorization); err != nil {
			result.Error = err.Error()
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Authorization{Authorization: result}}, err
	case *registryv1.WriteReply_Token:
		resp, err := c.router.Authn.ReviewToken(ctx, q.Token)
		if err != nil {
			resp = &authnv1.AuthenticateResponse{Error: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Token{Token: resp}}, rpc.FromStatus(err)
	case *registryv1.WriteReply_Rules:
		resp, err := c.router.Authz.Rules(ctx, q.Rules)
		if err != nil {
			resp = &authzv1.RulesResponse{Incomplete: true, EvaluationError: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Rules{Rules: resp}}, rpc.FromStatus(err)
	}
	return &registryv1.WriteCall{}, nil
}

// reviewAdmission sends a review to admission. Reviews of a namespace go to the same replica, because ResourceQuota
// evaluates from the last quota that its own replica has written. Other replicas receive the quota later, and their
// writes of it conflict.
func (c *requestContext) reviewAdmission(
	ctx context.Context,
	q *registryv1.AdmissionCallback,
) *registryv1.AdmissionResult {
	callAdmission := c.router.Admission.Validate
	if q.Phase == registryv1.Phase_PHASE_ADMIT {
		callAdmission = c.router.Admission.Admit
	}
	q.Review.AuditLevel = audit.Level(ctx)
	if q.Review.Namespace != "" {
		ctx = rpc.WithAffinity(ctx, "admission/"+q.Review.Namespace)
	}
	verdict, err := callAdmission(ctx, q.Review)
	if err == nil {
		audit.Annotate(ctx, verdict.AuditAnnotations)
		trackWebhooks(ctx, verdict.Webhooks)
		return &registryv1.AdmissionResult{Verdict: verdict}
	}
	err = rpc.FromStatus(err)
	audit.Annotate(ctx, rpc.AuditContextOf(err).GetAnnotations())
	trackWebhooks(ctx, rpc.AuditContextOf(err).GetWebhooks())
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		api = rpc.ToAPIStatus(err)
	}
	st := api.Status()
	refusal := rpc.StatusProto(&st)
	refusal.Warnings = rpc.Warnings(err)
	return &registryv1.AdmissionResult{Refusal: refusal}
}

// trackWebhooks adds the time of webhooks to the request's latency trackers, from which upstream takes the audit
// annotations and apiserver_request_sli_duration_seconds.
func trackWebhooks(ctx context.Context, l *commonv1.WebhookLatency) {
	if trackers, ok := request.LatencyTrackersFrom(ctx); ok && l != nil {
		trackers.MutatingWebhookTracker.TrackDuration(time.Duration(l.MutatingNanoseconds))
		trackers.ValidatingWebhookTracker.TrackDuration(time.Duration(l.ValidatingNanoseconds))
	}
}
