package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/verbs"
)

// chunkBytes is how much of a body one message of a stream carries.
const chunkBytes = 256 << 10

func (s *Service) endpoint(ctx context.Context, r *commonv1.Resource) (*verbs.Endpoint, error) {
	if e, ok := s.set.Endpoint(r); ok {
		return e, nil
	}
	if e, err := s.customs.Endpoint(ctx, r); e != nil || err != nil {
		return e, err
	}
	return nil, apierrors.NewGenericServerResponse(404, "", schemaResource(r), "", "404 page not found", 0, true)
}

// within is ctx with what the storages and strategies look for in it.
func within(ctx context.Context, verb string, r *commonv1.Resource, u *commonv1.User, namespace, name string) context.Context {
	ctx = request.WithUser(ctx, identity.User(u))
	return request.WithRequestInfo(ctx, &request.RequestInfo{IsResourceRequest: true, Verb: verb, APIGroup: r.GetGroup(), APIVersion: r.GetVersion(),
		Resource: r.GetResource(), Subresource: r.GetSubresource(), Namespace: namespace, Name: name, APIPrefix: prefixOf(r)})
}

func prefixOf(r *commonv1.Resource) string {
	if r.GetGroup() == "" {
		return "api"
	}
	return "apis"
}

// Get answers one object.
func (s *Service) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	e, err := s.endpoint(ctx, r.Resource)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp, err := e.Get(within(ctx, "get", r.Resource, r.User, r.Namespace, r.Name), r)
	return resp, rpc.ToStatus(err)
}

// List answers a list from etcd.
func (s *Service) List(r *registryv1.GetRequest, stream grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	e, err := s.endpoint(stream.Context(), r.Resource)
	if err != nil {
		return rpc.ToStatus(err)
	}
	body, err := e.List(within(stream.Context(), "list", r.Resource, r.User, r.Namespace, r.Name), r)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return inChunks(body, func(b []byte) error { return stream.Send(&registryv1.ListChunk{Data: b}) })
}

func inChunks(body []byte, send func([]byte) error) error {
	for first := true; first || len(body) > 0; first = false {
		n := min(len(body), chunkBytes)
		if err := send(body[:n]); err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}

// Write runs one write, asking back in its own stream.
func (s *Service) Write(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	r := first.GetRequest()
	if r == nil {
		return rpc.ToStatus(apierrors.NewBadRequest("a write begins with its request"))
	}
	e, err := s.endpoint(stream.Context(), r.Resource)
	if err != nil {
		return rpc.ToStatus(err)
	}
	resp, err := e.Write(within(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name), r, &streamGate{stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: resp}})
}

// Connect decides where a request that carries bytes goes, asking back in its own stream.
func (s *Service) Connect(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	r := first.GetRequest()
	if r == nil {
		return rpc.ToStatus(apierrors.NewBadRequest("a connection begins with its request"))
	}
	e, err := s.endpoint(stream.Context(), r.Resource)
	if err != nil {
		return rpc.ToStatus(err)
	}
	c, err := e.Connect(within(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name), r, &streamGate{stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Connection{Connection: c}})
}

// streamGate asks the gateway at the other end of a write's stream. Questions are asked one at a time: deletecollection
// asks from several goroutines.
type streamGate struct {
	mu     sync.Mutex
	stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]
}

func (g *streamGate) ask(q *registryv1.WriteReply) (*registryv1.WriteCall, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.stream.Send(q); err != nil {
		return nil, err
	}
	a, err := g.stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("the gateway ended the write")
	}
	return a, err
}

func (g *streamGate) Review(_ context.Context, phase registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
	a, err := g.ask(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Admission{Admission: &registryv1.AdmissionNeeded{Phase: phase, Review: r}}})
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	result := a.GetAdmission()
	if result == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("expected an admission result, got %T", a.GetCall()))
	}
	if result.Refusal != nil {
		return nil, rpc.APIError(result.Refusal)
	}
	return result.Verdict, nil
}

func (g *streamGate) Authorize(_ context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	a, err := g.ask(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Authorization{Authorization: attrs}})
	if err != nil {
		return nil, err
	}
	if e := a.GetAuthorization().GetError(); e != "" {
		return nil, errors.New(e)
	}
	if a.GetAuthorization().GetDecision() == nil {
		return nil, fmt.Errorf("expected a decision, got %T", a.GetCall())
	}
	return a.GetAuthorization().Decision, nil
}

func (g *streamGate) ReviewToken(_ context.Context, r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	a, err := g.ask(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Token{Token: r}})
	if err != nil {
		return nil, err
	}
	if a.GetToken() == nil {
		return nil, fmt.Errorf("expected a token review, got %T", a.GetCall())
	}
	return a.GetToken(), nil
}

func (g *streamGate) Rules(_ context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	a, err := g.ask(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Rules{Rules: r}})
	if err != nil {
		return nil, err
	}
	if a.GetRules() == nil {
		return nil, fmt.Errorf("expected rules, got %T", a.GetCall())
	}
	return a.GetRules(), nil
}

// Revision answers etcd's current revision.
func (s *Service) Revision(ctx context.Context, _ *registryv1.RevisionRequest) (*registryv1.RevisionResponse, error) {
	r, err := s.currentRevision(ctx)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	return &registryv1.RevisionResponse{Revision: r}, nil
}
