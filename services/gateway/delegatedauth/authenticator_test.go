package delegatedauth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authentication/user"

	"watershed.dev/platform/lifecycle"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// fakeAuthn authenticates with a function and counts its calls.
type fakeAuthn struct {
	authnv1.AuthnClient
	calls       int
	responseFor func(*authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse
}

func (a *fakeAuthn) Authenticate(_ context.Context, r *authnv1.AuthenticateRequest,
	_ ...grpc.CallOption) (*authnv1.AuthenticateResponse, error) {
	a.calls++
	return a.responseFor(r), nil
}

func authenticated(name string, groups ...string) *authnv1.AuthenticateResponse {
	return &authnv1.AuthenticateResponse{
		Authenticated:     true,
		User:              &commonv1.User{Name: name, Groups: groups},
		CacheMilliseconds: 60_000,
	}
}

// Requests of unauthenticated clients leave no cache entries and do not evict known users (S2).
func TestAnonymousClientsAreNotCached(t *testing.T) {
	fake := &fakeAuthn{responseFor: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		if v := r.Headers["Authorization"].GetValues(); len(v) > 0 && v[0] == "Bearer alice" {
			return authenticated("alice")
		}
		if v := r.Headers["Authorization"].GetValues(); len(v) > 0 && strings.HasPrefix(v[0], "Bearer wrong") {
			return &authnv1.AuthenticateResponse{Error: "no"}
		}
		return authenticated(user.Anonymous, user.AllUnauthenticated)
	}}
	a := NewAuthenticator(fake, []string{"X-Remote-User"}, []string{"X-Remote-Extra-"})
	authenticate := func(set func(*http.Request)) {
		req := httptest.NewRequest("GET", "/version", nil)
		set(req)
		_, _, _ = a.AuthenticateRequest(req)
	}
	alice := func(req *http.Request) { req.Header.Set("Authorization", "Bearer alice") }
	authenticate(alice)
	cachedBytes := a.users.bytes
	for i := range 3000 {
		authenticate(func(req *http.Request) {
			req.Header.Set("Authorization", fmt.Sprintf("Basic %d%s", i, strings.Repeat("a", 10_000)))
		})
		authenticate(func(req *http.Request) { req.Header.Set("Authorization", fmt.Sprint("Bearer wrong", i)) })
		authenticate(func(req *http.Request) { req.Header.Set("X-Remote-User", fmt.Sprint(i)) })
		authenticate(func(req *http.Request) {
			req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Raw: []byte(fmt.Sprint(i))}}}
		})
	}
	if a.users.bytes != cachedBytes {
		t.Errorf("%d bytes are cached, %d before", a.users.bytes, cachedBytes)
	}
	fake.calls = 0
	if authenticate(alice); fake.calls != 0 {
		t.Error("a known user was evicted")
	}
}

// Responses for anonymous users are never cached, because they depend on the path (S7).
func TestAnonymousResponseIsPerPath(t *testing.T) {
	fake := &fakeAuthn{responseFor: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		if r.Path == "/healthz" {
			return authenticated(user.Anonymous, user.AllUnauthenticated)
		}
		return &authnv1.AuthenticateResponse{}
	}}
	a := NewAuthenticator(fake, nil, nil)
	for _, x := range []struct {
		path string
		want bool
	}{{"/healthz", true}, {"/version", false}} { // in this order
		req := httptest.NewRequest("GET", x.path, nil)
		req.Header.Set("Authorization", "Basic x")
		if _, ok, _ := a.AuthenticateRequest(req); ok != x.want {
			t.Errorf("%s: %v", x.path, ok)
		}
	}
}

// Replaced headers are replaced for a cached response too. authn receives every value of a header.
func TestCredentialsAreRemoved(t *testing.T) {
	fake := &fakeAuthn{responseFor: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		out := authenticated("alice")
		out.ReplacedHeaders = map[string]*commonv1.Values{
			"Authorization":          {},
			"Sec-Websocket-Protocol": {Values: []string{"v4.channel.k8s.io"}},
		}
		if len(r.Headers["Sec-Websocket-Protocol"].GetValues()) != 2 {
			t.Errorf("called with %v", r.Headers)
		}
		return out
	}}
	a := NewAuthenticator(fake, nil, nil)
	for range 2 {
		req := httptest.NewRequest("GET", "/", nil)
		req.Header["Sec-Websocket-Protocol"] = []string{"v4.channel.k8s.io",
			"base64url.bearer.authorization.k8s.io.c2VjcmV0"}
		req.Header.Set("Authorization", "Bearer x")
		if _, ok, err := a.AuthenticateRequest(req); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if req.Header.Get("Authorization") != "" || strings.Contains(fmt.Sprint(req.Header), "c2VjcmV0") {
			t.Errorf("left in: %v", req.Header)
		}
	}
	if fake.calls != 1 {
		t.Errorf("%d calls", fake.calls)
	}
}

// A user is rejected if its request has headers that authn reads and this gateway does not pass on. This also holds if
// the response to the other headers is cached (S26).
func TestUnforwardedHeaderIsRejected(t *testing.T) {
	fake := &fakeAuthn{responseFor: func(*authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		out := authenticated("proxied")
		out.ConsultedHeaders = []string{"X-Remote-User", "X-Remote-Groups", "X-Remote-Extra-*", "X-Scope-*", "X-Remo*"}
		return out
	}}
	a := NewAuthenticator(fake, []string{"x-remote-user", "X-Remote-Group"}, []string{"X-Remote-Extra"})
	for _, x := range []struct {
		header string
		want   bool
	}{{"X-Remote-User", true}, {"X-Remote-Extra-Scopes", true}, {"X-Other", true}, {"X-Remote-Group", true},
		{"X-Remote-Groups", false}, {"X-Scope-Limited", false}, {"X-Scope", true}} {
		req := httptest.NewRequest("GET", "/version", nil)
		req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Raw: []byte("front proxy")}}}
		req.Header.Set(x.header, "v")
		_, ok, err := a.AuthenticateRequest(req)
		if ok != x.want || (err == nil) != x.want {
			t.Errorf("%s: %v, %v", x.header, ok, err)
		}
	}
}

// webhookAuthn authenticates after its webhook has timed out.
type webhookAuthn struct{ authnv1.AuthnClient }

func (webhookAuthn) Authenticate(ctx context.Context, _ *authnv1.AuthenticateRequest,
	_ ...grpc.CallOption) (*authnv1.AuthenticateResponse, error) {
	return authenticated("alice"), lifecycle.Sleep(ctx, webhookTime)
}

// The gateway waits for a response of authn that needs a webhook.
func TestAuthenticationWaitsForAWebhook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		req := httptest.NewRequest("GET", "/version", nil)
		req.Header.Set("Authorization", "Bearer alice")
		if _, ok, err := NewAuthenticator(webhookAuthn{}, nil, nil).AuthenticateRequest(req); !ok || err != nil {
			t.Errorf("%v, %v", ok, err)
		}
	})
}
