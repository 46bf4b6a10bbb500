package handlers

import (
	"context"
	"errors"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/identity"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Callbacks is the set of calls that a running write makes to the gateway, at the other end of the Write stream.
type Callbacks interface {
	// Lifecycle returns the registry's own NamespaceLifecycle plugin. It returns nil if the registry's namespaces are
	// not synced or not fresh.
	Lifecycle() admission.MutationInterface
	// Review runs an admission phase. An error rejects the write.
	Review(ctx context.Context, phase registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error)
	Authorize(ctx context.Context, a *commonv1.Attributes) (*authzv1.AuthorizeResponse, error)
	ReviewToken(ctx context.Context, r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error)
	Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error)
}

type callbacksKey struct{}

// withCallbacks returns ctx with callbacks. Authorizer, RuleResolver and TokenReviews read them from it.
func withCallbacks(ctx context.Context, callbacks Callbacks) context.Context {
	return context.WithValue(ctx, callbacksKey{}, callbacks)
}

func callbacksFrom(ctx context.Context) (Callbacks, error) {
	callbacks, ok := ctx.Value(callbacksKey{}).(Callbacks)
	if !ok {
		return nil, errors.New("no callbacks: the call did not come through a Write stream")
	}
	return callbacks, nil
}

// Authorizer authorizes through the Callbacks of the current write. Upstream's storages use it for escalation and
// approval checks. Without a decision, it returns NoOpinion and the error: these checks then reject the write, and a
// SubjectAccessReview has the error.
type Authorizer struct{}

// Authorize implements authorizer.Authorizer.
func (Authorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return authorizer.DecisionNoOpinion, "", err
	}
	resp, err := callbacks.Authorize(ctx, identity.AttributesProto(a))
	if err != nil {
		return authorizer.DecisionNoOpinion, "", err
	}
	if resp.EvaluationError != "" {
		err = errors.New(resp.EvaluationError)
	}
	return identity.Decision(resp.Decision), resp.Reason, err
}

// RuleResolver resolves a user's rules through the Callbacks of the current write.
type RuleResolver struct{}

// RulesFor implements authorizer.RuleResolver.
func (RuleResolver) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo,
	[]authorizer.NonResourceRuleInfo, bool, error) {
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return nil, nil, true, err
	}
	resp, err := callbacks.Rules(ctx, &authzv1.RulesRequest{User: identity.UserProto(u), Namespace: namespace})
	if err != nil {
		return nil, nil, true, err
	}
	var rr []authorizer.ResourceRuleInfo
	for _, r := range resp.ResourceRules {
		rr = append(rr, &authorizer.DefaultResourceRuleInfo{
			Verbs:         r.Verbs,
			APIGroups:     r.ApiGroups,
			Resources:     r.Resources,
			ResourceNames: r.ResourceNames,
		})
	}
	var nr []authorizer.NonResourceRuleInfo
	for _, r := range resp.NonResourceRules {
		nr = append(nr, &authorizer.DefaultNonResourceRuleInfo{Verbs: r.Verbs, NonResourceURLs: r.NonResourceUrls})
	}
	if resp.EvaluationError != "" {
		err = errors.New(resp.EvaluationError)
	}
	return rr, nr, resp.Incomplete, err
}
