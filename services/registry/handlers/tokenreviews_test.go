package handlers

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/kubernetes/pkg/apis/authentication"

	authnv1 "watershed.dev/proto/watershed/authn/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// reviewer is a Callbacks that returns response for every token, and records the requested audiences.
type reviewer struct {
	Callbacks
	response  *authnv1.AuthenticateResponse
	audiences []string
}

func (r *reviewer) ReviewToken(_ context.Context,
	q *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	r.audiences = q.Audiences
	return r.response, nil
}

// A TokenReview is authenticated only if the token is valid for the requested audiences (S24).
func TestTokenReviewAudiences(t *testing.T) {
	for name, c := range map[string]struct {
		own, asked, answered []string
		fails                bool
	}{
		"the API's own":   {own: []string{"api"}, answered: []string{"api"}},
		"another's":       {own: []string{"api"}, asked: []string{"vault"}, answered: []string{"vault"}},
		"not for the API": {own: []string{"api"}, answered: []string{"vault"}, fails: true},
		"not for the requested audience": {
			own:      []string{"api"},
			asked:    []string{"vault"},
			answered: []string{"api"},
			fails:    true,
		},
		"without audiences": {own: []string{"api"}, fails: true},
		"the API has none":  {},
	} {
		t.Run(name, func(t *testing.T) {
			callbacks := &reviewer{response: &authnv1.AuthenticateResponse{
				Authenticated: true,
				User:          &commonv1.User{Name: "bob"},
				Audiences:     c.answered,
			}}
			ctx := withCallbacks(request.WithNamespace(t.Context(), ""), callbacks)
			out, err := NewTokenReviews(c.own).Create(ctx,
				&authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: "t", Audiences: c.asked}},
				func(context.Context, runtime.Object) error { return nil }, &metav1.CreateOptions{})
			if c.fails {
				if err == nil {
					t.Errorf("the token is authenticated: %+v", out.(*authentication.TokenReview).Status)
				}
				return
			}
			if err != nil || !out.(*authentication.TokenReview).Status.Authenticated ||
				len(callbacks.audiences) != len(c.asked) {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
}
