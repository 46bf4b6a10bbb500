package authn

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/kubernetes/pkg/serviceaccount"

	authnv1 "watershed.dev/proto/watershed/authn/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// failingPods has no pods, and returns err for each.
type failingPods struct {
	serviceaccount.ServiceAccountTokenGetter
	err error
}

func (g *failingPods) GetPod(context.Context, string, string) (*corev1.Pod, error) { return nil, g.err }

// authenticateToken authenticates a client with a bearer token.
func authenticateToken(t *testing.T, s *Service, token string) (*authnv1.AuthenticateResponse, error) {
	t.Helper()
	return s.Authenticate(t.Context(), &authnv1.AuthenticateRequest{Headers: map[string]*commonv1.Values{
		"Authorization": {Values: []string{"Bearer " + token}}}})
}

// tokenOf returns a token that claims an issuer.
func tokenOf(issuer string) string { return "e30." + encoded(`{"iss":"`+issuer+`"}`) + ".c2ln" }

// A token is not invalid because its pod cannot be read. A token whose pod is gone is.
func TestATokenWhosePodCannotBeReadIsUndecided(t *testing.T) {
	s := service()
	pods := &failingPods{}
	s.tokenObjects.ServiceAccountTokenGetter = pods
	s.auth = authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if _, err := s.tokenObjects.GetPod(req.Context(), "x", "p"); err != nil {
			return nil, false, errors.New("service account token has been invalidated") // as upstream's validator does
		}
		return nil, false, nil
	})
	for _, x := range []struct {
		err  error
		want codes.Code
	}{
		{apierrors.NewServiceUnavailable("etcd is away"), codes.Unavailable},
		{context.DeadlineExceeded, codes.Unavailable},
		{apierrors.NewTooManyRequests("later", 1), codes.Unavailable},
		{&url.Error{Op: "Get", Err: io.EOF}, codes.Unavailable},
		{errors.New("resource name may not be empty"), codes.OK},
		{apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "p"), codes.OK},
	} {
		pods.err = x.err
		s.tokenObjects.failedAt.Store(nil)
		r, err := authenticateToken(t, s, tokenOf(serviceaccount.LegacyIssuer))
		if status.Code(err) != x.want || err == nil && r.Authenticated {
			t.Errorf("%v: %v, %v", x.err, r, err)
		}
	}
}

// After a failed read, only tokens of service accounts are undecided. Upstream reads no object for other tokens.
func TestOtherTokensAreInvalidAfterAFailedRead(t *testing.T) {
	s := service()
	s.config.Options.ServiceAccounts.Issuers = []string{"https://a", "https://b"}
	s.auth = authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
		return nil, false, errors.New("invalid bearer token")
	})
	s.tokenObjects.record(t.Context(), apierrors.NewServiceUnavailable("etcd is away"))
	for token, want := range map[string]codes.Code{
		tokenOf("https://b"):                  codes.Unavailable,
		tokenOf(serviceaccount.LegacyIssuer):  codes.Unavailable,
		tokenOf("https://oidc"):               codes.OK,
		"e30." + encoded("no claims") + ".c2": codes.OK,
		"e30.%.c2":                            codes.OK,
		"abc":                                 codes.OK,
	} {
		r, err := authenticateToken(t, s, token)
		if status.Code(err) != want || err == nil && r.Authenticated {
			t.Errorf("%s: %v, %v", token, r, err)
		}
		_, err = s.ReviewToken(t.Context(), &authnv1.ReviewTokenRequest{Token: token})
		if status.Code(err) != want {
			t.Errorf("%s: a review: %v", token, err)
		}
	}
}

// A client that leaves does not make the tokens of other clients undecided. A read that another context ended does.
func TestACanceledReadIsNotRecorded(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	err := &url.Error{Op: "Get", Err: context.Canceled}
	for name, x := range map[string]struct {
		ctx  context.Context
		want bool
	}{"the client has left": {canceled, false}, "the client waits": {t.Context(), true}} {
		objects := tokenObjects{ServiceAccountTokenGetter: &failingPods{err: err}}
		_, _ = objects.GetPod(x.ctx, "x", "p")
		if objects.failedSince(time.Now()) != x.want {
			t.Errorf("%s: the failed read is recorded: %v", name, !x.want)
		}
	}
}
