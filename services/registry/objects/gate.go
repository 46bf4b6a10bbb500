package objects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// streamGate asks the gateway at the other end of a write's stream. Questions are asked one at a time: deletecollection
// asks from several goroutines.
type streamGate struct {
	*Namespaces
	mu     sync.Mutex
	stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]
}

func (g *streamGate) ask(ctx context.Context, q *registryv1.WriteReply) (*registryv1.WriteCall, error) {
	q.Traceparent = telemetry.Traceparent(ctx)
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

func (g *streamGate) Review(ctx context.Context, phase registryv1.Phase,
	r *admissionv1.Review) (*admissionv1.Verdict, error) {
	needed := &registryv1.AdmissionCallback{Phase: phase, Review: r}
	a, err := g.ask(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Admission{Admission: needed}})
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	result := a.GetAdmission()
	if result == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("expected an admission result, got %T", a.GetCall()))
	}
	if result.Refusal != nil {
		return nil, rpc.WithWarnings(rpc.APIError(result.Refusal), result.Refusal.Warnings)
	}
	return result.Verdict, nil
}

func (g *streamGate) Authorize(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	a, err := g.ask(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Authorization{Authorization: attrs}})
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

func (g *streamGate) ReviewToken(ctx context.Context,
	r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	a, err := g.ask(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Token{Token: r}})
	if err != nil {
		return nil, err
	}
	if a.GetToken() == nil {
		return nil, fmt.Errorf("expected a token review, got %T", a.GetCall())
	}
	return a.GetToken(), nil
}

func (g *streamGate) Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	a, err := g.ask(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Rules{Rules: r}})
	if err != nil {
		return nil, err
	}
	if a.GetRules() == nil {
		return nil, fmt.Errorf("expected rules, got %T", a.GetCall())
	}
	return a.GetRules(), nil
}

// directGate refuses every question, and notes that there was one: nothing is written but what needs no answer.
type directGate struct {
	*Namespaces
	asked atomic.Bool
}

var errAsks = apierrors.NewInternalError(errors.New("the write is to be asked about"))

func (g *directGate) refuse() error {
	g.asked.Store(true)
	return errAsks
}

func (g *directGate) Review(context.Context, registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
	return nil, g.refuse()
}

func (g *directGate) Authorize(context.Context, *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	return nil, g.refuse()
}

func (g *directGate) ReviewToken(context.Context,
	*authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	return nil, g.refuse()
}

func (g *directGate) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return nil, g.refuse()
}
