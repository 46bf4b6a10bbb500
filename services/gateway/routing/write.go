package routing

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

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

// write carries one write to registry and answers what registry asks on the way.
func (c *call) write() {
	data, err := body.Read(c.req)
	if err != nil {
		c.fail(err)
		return
	}
	r := c.writeRequest()
	c.body = data
	r.ContentType, r.Body, r.Output = c.req.Header.Get("Content-Type"), data, c.out
	if !c.mayAsk(r) {
		result, asks, err := c.writeDirect(r)
		switch {
		case err != nil:
			c.fail(err)
			return
		case !asks:
			c.respond(result)
			return
		}
	}
	m, err := c.converse(r, c.router.Objects.Write)
	if err != nil {
		c.fail(err)
		return
	}
	c.respond(m.GetResult())
}

// asking are the groups whose writes registry mostly has to ask about, whatever admission looks at: reviews are
// answered by what others say, and roles and requests for certificates are for who may grant them.
var asking = []string{"authentication.k8s.io", "authorization.k8s.io", "certificates.k8s.io",
	"rbac.authorization.k8s.io"}

// operationsOf are those that a verb's write may be.
var operationsOf = map[string][]admissionv1.Operation{
	"create": {admissionv1.Operation_OPERATION_CREATE},
	"update": {admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE},
	"patch":  {admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE},
	"delete": {admissionv1.Operation_OPERATION_DELETE},
}

// mayAsk says whether registry is expected to ask something about a write.
func (c *call) mayAsk(r *registryv1.WriteRequest) bool {
	ops, ok := operationsOf[r.Verb]
	return !ok || slices.Contains(asking, c.entry.Resource.GetGroup()) ||
		slices.ContainsFunc(ops, func(op admissionv1.Operation) bool {
			return slices.Contains(r.Validate, op) || slices.Contains(r.Admit, op) && !slices.Contains(r.NamespaceLifecycleOnly, op)
		})
}

// writeDirect carries a write to registry that nothing is expected to be asked about. asks: it has to be, and nothing
// was written.
func (c *call) writeDirect(r *registryv1.WriteRequest) (result *registryv1.ObjectResponse, asks bool, err error) {
	reply, err := c.router.Objects.WriteUnary(c.preferring(c.req.Context(), r.Namespace, r.Name), r)
	if status.Code(err) == codes.Unimplemented { // by an older release
		return nil, true, nil
	}
	if err != nil {
		return nil, false, rpc.FromStatus(err)
	}
	if len(reply.Error) > 0 {
		of := &rpcstatus.Status{}
		if err := proto.Unmarshal(reply.Error, of); err != nil {
			return nil, false, err
		}
		return nil, false, rpc.WithAuditContext(rpc.FromStatus(status.ErrorProto(of)), reply.Audit)
	}
	return reply.Result, reply.CallbackRequired, nil
}

// preferring sends what is about one object to one registry, which knows what it has written and answered last.
func (c *call) preferring(ctx context.Context, namespace, name string) context.Context {
	if name == "" {
		return ctx
	}
	return rpc.WithAffinity(ctx, c.entry.StorageResource+"/"+namespace+"/"+name)
}

func (c *call) writeRequest() *registryv1.WriteRequest {
	r := &registryv1.WriteRequest{
		Verb:      c.info.Verb,
		Resource:  c.entry.Resource,
		Namespace: c.namespace(),
		Name:      c.info.Name,
		User:      c.user,
		Query:     c.req.URL.RawQuery,
		UserAgent: c.req.UserAgent(),
		Path:      c.req.URL.Path,

		AuditLevel: audit.Level(c.req.Context()),
	}
	if !c.asksItself() {
		c.router.Interests.Name(r)
	}
	return r
}

// asksItself says whether the request is a SubjectAccessReview that admission posts while it reviews another request.
// Admission is not asked about it, which might recurse without end; kube-apiserver's plugins ask its authorizer without
// a request.
func (c *call) asksItself() bool {
	return c.user.GetName() == identity.Admission && slices.Contains(c.user.GetGroups(), identity.ServicesGroup) &&
		c.entry.Resource.GetGroup() == "authorization.k8s.io" &&
		c.entry.Resource.GetResource() == "subjectaccessreviews"
}

// conversation is a stream on which registry may ask back before it answers.
type conversation = grpc.BidiStreamingClient[registryv1.WriteCall, registryv1.WriteReply]

// questionsWithin is how long what registry asks about one object's write may take, all together: a little longer than
// the write itself may (services/registry/handlers), so that registry says so.
const questionsWithin = 34*time.Second + 100*time.Millisecond

// converse sends one request and answers what registry asks until it has an answer.
func (c *call) converse(r *registryv1.WriteRequest,
	open func(context.Context, ...grpc.CallOption) (conversation, error)) (*registryv1.WriteReply, error) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	if r.Verb != "connect" {
		ctx = c.preferring(ctx, r.Namespace, r.Name)
	}
	stream, err := open(ctx)
	if err == nil {
		err = stream.Send(&registryv1.WriteCall{Call: &registryv1.WriteCall_Request{Request: r}})
	}
	asking := ctx
	if operationsOf[r.Verb] != nil {
		var done context.CancelFunc
		asking, done = context.WithTimeout(ctx, questionsWithin)
		defer done()
	}
	var trail *commonv1.AuditContext
	for err == nil || errors.Is(err, io.EOF) {
		var m *registryv1.WriteReply
		if m, err = stream.Recv(); err != nil {
			break
		}
		if m.Audit != nil { // an error follows
			trail = m.Audit
			continue
		}
		if m.GetResult() != nil || m.GetConnection() != nil {
			if trace.SpanContextFromContext(ctx).IsSampled() {
				_, _ = stream.Recv() // its end: a call that is given up is shown as failed
			}
			return m, nil
		}
		err = stream.Send(c.resolve(telemetry.WithTraceparent(asking, m.Traceparent), m))
	}
	return nil, rpc.WithAuditContext(rpc.FromStatus(err), trail)
}

// resolve asks the service that registry's question is for. A question that cannot be answered refuses the write.
func (c *call) resolve(ctx context.Context, q *registryv1.WriteReply) *registryv1.WriteCall {
	switch q := q.Reply.(type) {
	case *registryv1.WriteReply_Admission:
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Admission{Admission: c.review(ctx, q.Admission)}}
	case *registryv1.WriteReply_Authorization:
		result := &registryv1.AuthorizationResult{}
		var err error
		if result.Decision, err = c.router.Authorize.Ask(ctx, q.Authorization); err != nil {
			result.Error = err.Error()
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Authorization{Authorization: result}}
	case *registryv1.WriteReply_Token:
		resp, err := c.router.Authn.ReviewToken(ctx, q.Token)
		if err != nil {
			resp = &authnv1.AuthenticateResponse{Error: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Token{Token: resp}}
	case *registryv1.WriteReply_Rules:
		resp, err := c.router.Authz.Rules(ctx, q.Rules)
		if err != nil {
			resp = &authzv1.RulesResponse{Incomplete: true, EvaluationError: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Rules{Rules: resp}}
	}
	return &registryv1.WriteCall{}
}

func (c *call) review(ctx context.Context, q *registryv1.AdmissionCallback) *registryv1.AdmissionResult {
	ask := c.router.Admission.Validate
	if q.Phase == registryv1.Phase_PHASE_ADMIT {
		ask = c.router.Admission.Admit
	}
	q.Review.AuditLevel = audit.Level(ctx)
	verdict, err := ask(ctx, q.Review)
	if err == nil {
		audit.Annotate(ctx, verdict.AuditAnnotations)
		return &registryv1.AdmissionResult{Verdict: verdict}
	}
	err = rpc.FromStatus(err)
	audit.Annotate(ctx, rpc.AuditContextOf(err).GetAnnotations())
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		api = rpc.ToAPIStatus(err)
	}
	st := api.Status()
	refusal := rpc.StatusProto(&st)
	refusal.Warnings = rpc.Warnings(err)
	return &registryv1.AdmissionResult{Refusal: refusal}
}
