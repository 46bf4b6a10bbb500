package delegatedauth

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/filters/impersonation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/platform/identity"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// alwaysAllow is authz with AlwaysAllow. It counts its calls.
type alwaysAllow struct {
	authzv1.AuthzClient
	calls int
}

func (a *alwaysAllow) Authorize(_ context.Context, r *authzv1.AuthorizeRequest,
	_ ...grpc.CallOption) (*authzv1.AuthorizeResponse, error) {
	a.calls++
	if r.Attributes.User.Name == user.Anonymous && !r.ClientAuthenticated {
		return &authzv1.AuthorizeResponse{}, nil
	}
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW}, nil
}

// With AlwaysAllow, a request without credentials is unauthenticated, even if authn accepts it. Before the first policy
// revision, authz rejects it. Clients with credentials may impersonate and review the anonymous user.
func TestAnonymousClientsWithAlwaysAllow(t *testing.T) {
	fake := &fakeAuthn{responseFor: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		if r.Headers["Authorization"] != nil {
			return authenticated("alice", user.AllAuthenticated)
		}
		return authenticated(user.Anonymous, user.AllUnauthenticated)
	}}
	authn := NewAuthenticator(fake, nil, nil)
	authz := &alwaysAllow{}
	a := &Authorizer{Client: authz}
	authn.RejectsAnonymous = a.RejectsAnonymous

	anonymous := podAttributes(user.Anonymous, "get")
	var handled context.Context
	h := http.Handler(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { handled = req.Context() }))
	h = filters.WithAuthorization(h, a, scheme.Codecs)
	h = impersonation.WithImpersonation(h, a, scheme.Codecs)
	h = filters.WithAuthentication(h, authn, filters.Unauthorized(scheme.Codecs), nil, nil)
	h = filters.WithRequestInfo(h, &request.RequestInfoFactory{
		APIPrefixes:          sets.NewString("api", "apis"),
		GrouplessAPIPrefixes: sets.NewString("api"),
	})
	send := func(credential, impersonated string) int {
		req := httptest.NewRequest("GET", "/api/v1/namespaces/default/pods?watch=true", nil)
		for name, value := range map[string]string{"Authorization": credential, "Impersonate-User": impersonated} {
			if value != "" {
				req.Header.Set(name, value)
			}
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w.Code
	}
	for _, impersonated := range []string{"", user.Anonymous, "bob"} {
		if code := send("", impersonated); code != http.StatusForbidden {
			t.Errorf("before the first policy revision, as %q: %d", impersonated, code)
		}
	}
	a.observe(&authzv1.PolicyRevision{Revision: 1, Replica: "a", RejectsAnonymous: true}, true)
	a.observe(&authzv1.PolicyRevision{Revision: 1, Replica: "a", Heartbeat: true}, false)
	a.observe(nil, false) // the stream breaks
	authz.calls = 0
	for _, impersonated := range []string{"", user.Anonymous, "bob"} {
		if code := send("", impersonated); code != http.StatusUnauthorized || authz.calls != 0 {
			t.Errorf("as %q: %d, after %d calls of authz", impersonated, code, authz.calls)
		}
	}
	for _, impersonated := range []string{"", user.Anonymous, "bob"} {
		if code := send("Bearer alice", impersonated); code != http.StatusOK {
			t.Errorf("alice as %q: %d", impersonated, code)
			continue
		}
		// a review of the anonymous user, and a watch whose policy changed
		if d, err := a.Decide(handled, identity.AttributesProto(anonymous)); err != nil ||
			d.Decision != authzv1.Decision_DECISION_ALLOW {
			t.Errorf("a review by alice as %q: %v, %v", impersonated, d, err)
		}
		if attrs, err := filters.GetAuthorizerAttributes(handled); err != nil || !a.Reauthorize(handled, attrs) {
			t.Errorf("the watch of alice as %q ends: %v", impersonated, err)
		}
	}
	a.observe(&authzv1.PolicyRevision{Revision: 1, Replica: "b"}, true)
	if a.RejectsAnonymous() {
		t.Error("the mode of an earlier replica counts")
	}
}
