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

// streamCallbacks sends callbacks to the gateway in a write's stream. It sends them one after another, because
// deletecollection sends them from several goroutines.
type streamCallbacks struct {
	*Namespaces
	mu     sync.Mutex
	stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]
}

func (s *streamCallbacks) callback(ctx context.Context, q *registryv1.WriteReply) (*registryv1.WriteCall, error) {
	q.Traceparent = telemetry.Traceparent(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.stream.Send(q); err != nil {
		return nil, err
	}
	a, err := s.stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("the gateway ended the write")
	}
	return a, err
}

func (s *streamCallbacks) Review(ctx context.Context, phase registryv1.Phase,
	r *admissionv1.Review) (*admissionv1.Verdict, error) {
	needed := &registryv1.AdmissionCallback{Phase: phase, Review: r}
	a, err := s.callback(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Admission{Admission: needed}})
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

func (s *streamCallbacks) Authorize(
	ctx context.Context,
	attrs *commonv1.Attributes,
) (*authzv1.AuthorizeResponse, error) {
	a, err := s.callback(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Authorization{Authorization: attrs}})
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

func (s *streamCallbacks) ReviewToken(ctx context.Context,
	r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	a, err := s.callback(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Token{Token: r}})
	if err != nil {
		return nil, err
	}
	if a.GetToken() == nil {
		return nil, fmt.Errorf("expected a token review, got %T", a.GetCall())
	}
	return a.GetToken(), nil
}

func (s *streamCallbacks) Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	a, err := s.callback(ctx, &registryv1.WriteReply{Reply: &registryv1.WriteReply_Rules{Rules: r}})
	if err != nil {
		return nil, err
	}
	if a.GetRules() == nil {
		return nil, fmt.Errorf("expected rules, got %T", a.GetCall())
	}
	return a.GetRules(), nil
}

// noCallbacks fails every callback and records that it was called. A write under noCallbacks stores an object only if
// it needs no callback.
type noCallbacks struct {
	*Namespaces
	callbackRequired atomic.Bool
}

var errCallbackRequired = apierrors.NewInternalError(errors.New("the write requires a callback"))

func (c *noCallbacks) requireCallback() error {
	c.callbackRequired.Store(true)
	return errCallbackRequired
}

func (c *noCallbacks) Review(context.Context, registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
	return nil, c.requireCallback()
}

func (c *noCallbacks) Authorize(context.Context, *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	return nil, c.requireCallback()
}

func (c *noCallbacks) ReviewToken(context.Context,
	*authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	return nil, c.requireCallback()
}

func (c *noCallbacks) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return nil, c.requireCallback()
}
