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
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

func gauge() prometheus.Gauge { return prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}) }

func digestOf(s string) digest {
	d := newDigester()
	d.part(s)
	sum, _ := d.sum()
	return sum
}

// The cache never exceeds its bound, and an owner's entries never exceed the owner's bound.
func TestCacheIsBoundedInBytes(t *testing.T) {
	k := newCache[int](100_000, 20_000, gauge())
	for i := range 1000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 20_000 {
		t.Errorf("an owner has %d bytes", k.bytes)
	}
	k.put(digestOf("alice"), "alice", 1, 1000, time.Now().Add(time.Hour))
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if _, ok := k.get(digestOf("alice")); !ok {
		t.Error("an owner has evicted another")
	}
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("many", i)), fmt.Sprint("user", i), i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 100_000 || len(k.entries) != k.lru.Len() || len(k.owners) > len(k.entries) {
		t.Errorf("%d bytes, %d entries of %d, %d owners", k.bytes, len(k.entries), k.lru.Len(), len(k.owners))
	}
	k.put(digestOf("huge"), "x", 1, 30_000, time.Now().Add(time.Hour))
	if _, ok := k.get(digestOf("huge")); ok {
		t.Error("an entry above the owner's bound is cached")
	}
}

func TestCacheEntriesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newCache[int](100_000, 20_000, gauge())
		k.put(digestOf("a"), "a", 1, 10, time.Now().Add(time.Second))
		if _, ok := k.get(digestOf("a")); !ok {
			t.Error("it is not cached")
		}
		time.Sleep(2 * time.Second)
		if _, ok := k.get(digestOf("a")); ok || k.bytes != 0 {
			t.Errorf("it is cached for too long (%d bytes)", k.bytes)
		}
	})
}

func TestPartsAreNotMixedUp(t *testing.T) {
	seen := map[digest]string{}
	for _, parts := range [][]string{{"ab", "c"}, {"a", "bc"}, {"abc"}, {"abc", ""}, {"", "abc"}, {}} {
		d := newDigester()
		for _, p := range parts {
			d.part(p)
		}
		sum, ok := d.sum()
		if other, known := seen[sum]; known || !ok {
			t.Errorf("%q and %s are the same", parts, other)
		}
		seen[sum] = fmt.Sprintf("%q", parts)
	}
	d := newDigester()
	d.part(strings.Repeat("x", 1<<20))
	if _, ok := d.sum(); ok {
		t.Error("a megabyte is a key")
	}
}

// Two users with equal strings in groups and extra, divided differently, have different keys (S25).
func TestUsersAreNotMixedUp(t *testing.T) {
	seen := map[digest]user.Info{}
	for _, u := range []user.Info{
		&user.DefaultInfo{Name: "a", Groups: []string{"g", "extra", "k", "v"}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v", "k2", "v2"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}, "k2": {"v2"}}},
	} {
		keys, _ := newCacheKeys(authorizer.AttributesRecord{User: u, Verb: "get", Path: "/x"})
		key := keys.exact
		if other, known := seen[key]; known {
			t.Errorf("%v and %v are the same", u, other)
		}
		seen[key] = u
	}
}

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

// A decision without a policy revision is cached for its TTL. Without a TTL it is not cached (S3).
func TestDecisionExpiresWithItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeAuthz{response: &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, Replica: "a"}}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		callsFor := func(attrs authorizer.Attributes) int {
			before := p.calls
			_, _, _ = a.Authorize(t.Context(), attrs)
			return p.calls - before
		}
		callsFor(podAttributes("webhook", "get"))
		if callsFor(podAttributes("webhook", "get")) != 1 {
			t.Error("a decision without a policy revision is cached")
		}
		p.response.CacheMilliseconds = 1000
		callsFor(podAttributes("timed", "get"))
		if callsFor(podAttributes("timed", "get")) != 0 {
			t.Error("a decision with a TTL of a second is not cached")
		}
		time.Sleep(2 * time.Second)
		if callsFor(podAttributes("timed", "get")) != 1 {
			t.Error("a decision with a TTL of a second is cached for longer")
		}
		p.response.CacheMilliseconds, p.response.PolicyRevision = 0, 5
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a", Heartbeat: true}, false)
		anonymous := authorizer.AttributesRecord{
			User: &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}},
			Verb: "get",
			Path: "/x",
		}
		callsFor(anonymous)
		if callsFor(anonymous) != 1 {
			t.Error("an anonymous user's decision is cached")
		}
		p.response.EvaluationError = "the webhook does not answer"
		callsFor(podAttributes("erring", "get"))
		if callsFor(podAttributes("erring", "get")) != 1 {
			t.Error("a decision is cached though an authorizer failed")
		}
	})
}

// A frozen replica sends no messages. Its decisions are not used after PolicyRevisionLease (S23).
func TestUnresponsiveReplicaExpiresDecisions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "a",
		}}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		_, _, _ = a.Authorize(t.Context(), podAttributes("bob", "get"))
		time.Sleep(2 * time.Second)
		if _, _, _ = a.Authorize(t.Context(), podAttributes("bob", "get")); p.calls != 1 {
			t.Errorf("%d calls", p.calls)
		}
		time.Sleep(2 * time.Second)
		if _, _, _ = a.Authorize(t.Context(), podAttributes("bob", "get")); p.calls != 2 {
			t.Errorf("a frozen replica's decision is used: %d calls", p.calls)
		}
	})
}

func namespacedAttributes(namespace, name, verb string) authorizer.Attributes {
	return authorizer.AttributesRecord{
		User:            &user.DefaultInfo{Name: name},
		Verb:            verb,
		ResourceRequest: true,
		Resource:        "pods",
		Namespace:       namespace,
	}
}

// A policy change in a namespace does not affect decisions and watches of other namespaces. A change that only grants
// permissions invalidates no allow decision (S12).
func TestNamespacePolicyIsIndependent(t *testing.T) {
	p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	called := func(attrs authorizer.Attributes) bool {
		before := p.calls
		_, _, _ = a.Authorize(t.Context(), attrs)
		return p.calls > before
	}
	isClosed := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	called(namespacedAttributes("mine", "bob", "get"))
	called(namespacedAttributes("other", "bob", "get"))
	mine, other, cluster := a.PolicyChanged("mine"), a.PolicyChanged("other"), a.PolicyChanged("")
	a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Namespace: "mine"}, false)
	if called(namespacedAttributes("mine", "bob", "get")) || isClosed(mine) {
		t.Error("a granted permission invalidates another")
	}
	p.response.PolicyRevision = 7
	a.observe(&authzv1.PolicyRevision{Revision: 7, Replica: "a", Namespace: "mine", MayRevoke: true}, false)
	if !called(namespacedAttributes("mine", "bob", "get")) || !isClosed(mine) {
		t.Error("a revoked permission is still cached")
	}
	if called(namespacedAttributes("other", "bob", "get")) || isClosed(other) || isClosed(cluster) {
		t.Error("another namespace is affected")
	}
	p.response.PolicyRevision = 8
	a.observe(&authzv1.PolicyRevision{Revision: 8, Replica: "a", MayRevoke: true}, false)
	if !called(namespacedAttributes("mine", "bob", "get")) || !called(namespacedAttributes("other", "bob", "get")) ||
		!isClosed(other) ||
		!isClosed(cluster) {
		t.Error("a cluster-wide change does not affect every namespace")
	}
	p.response.Decision = authzv1.Decision_DECISION_UNSPECIFIED
	called(namespacedAttributes("mine", "eve", "get"))
	a.observe(&authzv1.PolicyRevision{Revision: 9, Replica: "a", Namespace: "mine"}, false)
	if !called(namespacedAttributes("mine", "eve", "get")) {
		t.Error("a refusal is still cached after a grant")
	}
}

// Reauthorize retries while authz gives no valid decision, and ends the watch after a timeout (S11).
func TestReauthorizationTimeoutEndsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "another",
		}}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a"}, true)
		began := time.Now()
		if a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
			t.Error("it goes on")
		}
		took := time.Since(began)
		synctest.Wait() // for the last call, which has no waiter left
		if took < reauthorizeTimeout || took > reauthorizeTimeout+time.Second || p.calls < 5 {
			t.Errorf("after %v and %d calls", took, p.calls)
		}
		go func() {
			time.Sleep(time.Second)
			a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Heartbeat: true}, false)
			p.set(
				&authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, PolicyRevision: 6, Replica: "a"},
			)
		}()
		if !a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
			t.Error("it ends though it is allowed")
		}
	})
}

// unresponsiveAuthz is an authz whose stream of policy revisions cannot be opened.
type unresponsiveAuthz struct {
	fakeAuthz
	opened       int
	waitForReady bool
}

func (s *unresponsiveAuthz) PolicyRevisions(_ context.Context, _ *authzv1.PolicyRevisionsRequest,
	opts ...grpc.CallOption) (grpc.ServerStreamingClient[authzv1.PolicyRevision], error) {
	s.opened++
	s.waitForReady = true
	for _, o := range opts {
		if f, ok := o.(grpc.FailFastCallOption); ok && f.FailFast {
			s.waitForReady = false
		}
	}
	return nil, status.Error(codes.Unavailable, "away")
}

// Without heartbeats, open watches are reauthorized once after heartbeatTimeout. Reauthorize ends a watch that authz
// does not confirm (S11).
func TestWatchesAreReauthorizedWithoutHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &unresponsiveAuthz{}
		a := &Authorizer{Client: s}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		policyChanged := a.PolicyChanged("x")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { a.Run(ctx); close(done) }()
		began := time.Now()
		<-policyChanged
		if took := time.Since(began); took < heartbeatTimeout || took > heartbeatTimeout+2*time.Second {
			t.Errorf("after %v", took)
		}
		select {
		case <-a.PolicyChanged("x"):
			t.Error("they are reauthorized repeatedly")
		case <-time.After(time.Minute):
		}
		cancel()
		<-done
		if s.waitForReady || s.opened < 100 {
			t.Errorf("it waits for a ready authz: %v, opened %d times", s.waitForReady, s.opened)
		}
	})
}

// A transient decision is not cached. For an open watch it counts only if it comes from the replica with the newest
// policy.
func TestTransientDecisionIsNotCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "a",
			Transient:      true,
		}}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		for want := 1; want < 3; want++ {
			if _, _, err := a.Authorize(t.Context(), podAttributes("bob", "get")); err != nil || p.calls != want {
				t.Errorf("%d calls: %v", p.calls, err)
			}
		}
		if !a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
			t.Error("it ends though it is allowed")
		}
		p.set(&authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 90,
			Replica:        "b",
			Transient:      true,
		})
		a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
		if a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
			t.Error("a decision of a replica with an older policy counts")
		}
	})
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
