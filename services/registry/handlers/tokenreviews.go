package handlers

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/kubernetes/pkg/apis/authentication"
	"k8s.io/kubernetes/pkg/registry/authentication/tokenreview"

	"watershed.dev/platform/identity"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
)

// TokenReviews serves the TokenReview resource. It wraps upstream's storage, which would authenticate with a new
// context that lacks Callbacks. TokenReviews makes that call itself.
type TokenReviews struct {
	*tokenreview.REST
	audiences authenticator.Audiences
}

// NewTokenReviews wraps upstream's storage. audiences are the API's own: a review without audiences is for them.
func NewTokenReviews(audiences []string) *TokenReviews {
	return &TokenReviews{tokenreview.NewREST(nil, nil), audiences}
}

// errAudiences is upstream's error for an authenticator that ignores audiences
// (k8s.io/kubernetes/pkg/registry/authentication/tokenreview, badAuthenticatorAuds).
var errAudiences = apierrors.NewInternalError(errors.New("error validating audiences"))

// Create implements rest.Creater.
func (t *TokenReviews) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	opts *metav1.CreateOptions) (runtime.Object, error) {
	out, err := t.REST.Create(ctx, obj, validate, opts) // without an authenticator it only validates the review
	if err != nil {
		return nil, err
	}
	review := out.(*authentication.TokenReview)
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	resp, err := callbacks.ReviewToken(ctx, &authnv1.ReviewTokenRequest{
		Token:     review.Spec.Token,
		Audiences: review.Spec.Audiences,
	})
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	audiences := t.audiences
	if len(review.Spec.Audiences) > 0 {
		audiences = authenticator.Audiences(review.Spec.Audiences)
	}
	if len(audiences) > 0 && resp.Authenticated && len(audiences.Intersect(resp.Audiences)) == 0 {
		return nil, errAudiences
	}
	review.Status.Authenticated, review.Status.Error = resp.Authenticated, resp.Error
	if resp.Authenticated {
		u := identity.User(resp.User)
		review.Status.User = authentication.UserInfo{
			Username: u.Name,
			UID:      u.UID,
			Groups:   u.Groups,
			Extra:    map[string]authentication.ExtraValue{},
		}
		for k, v := range u.Extra {
			review.Status.User.Extra[k] = v
		}
		review.Status.Audiences = resp.Audiences
	}
	return review, nil
}
