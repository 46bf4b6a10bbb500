package access

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

// However much is put, no more than the bound is kept, and no more than a share of it for one owner.
func TestWhatIsKeptIsBoundedInBytes(t *testing.T) {
	k := newCache[int](100_000, 20_000, gauge())
	for i := range 1000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 20_000 {
		t.Errorf("one owner has %d bytes", k.bytes)
	}
	k.put(digestOf("alice"), "alice", 1, 1000, time.Now().Add(time.Hour))
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if _, ok := k.get(digestOf("alice")); !ok {
		t.Error("one owner has driven out another")
	}
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("many", i)), fmt.Sprint("user", i), i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 100_000 || len(k.entries) != k.used.Len() || len(k.owners) > len(k.entries) {
		t.Errorf("%d bytes, %d entries of %d, %d owners", k.bytes, len(k.entries), k.used.Len(), len(k.owners))
	}
	k.put(digestOf("huge"), "x", 1, 30_000, time.Now().Add(time.Hour))
	if _, ok := k.get(digestOf("huge")); ok {
		t.Error("more than a share is kept at once")
	}
}

func TestWhatIsKeptExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newCache[int](100_000, 20_000, gauge())
		k.put(digestOf("a"), "a", 1, 10, time.Now().Add(time.Second))
		if _, ok := k.get(digestOf("a")); !ok {
			t.Error("it is not kept")
		}
		time.Sleep(2 * time.Second)
		if _, ok := k.get(digestOf("a")); ok || k.bytes != 0 {
			t.Errorf("it is kept for too long (%d bytes)", k.bytes)
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

// Groups and extra that say the same one after the other are not the same user (S25).
func TestUsersAreNotMixedUp(t *testing.T) {
	seen := map[digest]user.Info{}
	for _, u := range []user.Info{
		&user.DefaultInfo{Name: "a", Groups: []string{"g", "extra", "k", "v"}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v", "k2", "v2"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}, "k2": {"v2"}}},
	} {
		keys, _ := keysOf(authorizer.AttributesRecord{User: u, Verb: "get", Path: "/x"})
		key := keys.this
		if other, known := seen[key]; known {
			t.Errorf("%v and %v are the same", u, other)
		}
		seen[key] = u
	}
}

// authn is one that knows who anybody is by the token.
type authn struct {
	authnv1.AuthnClient
	asked  int
	answer func(*authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse
}

func (a *authn) Authenticate(_ context.Context, r *authnv1.AuthenticateRequest,
	_ ...grpc.CallOption) (*authnv1.AuthenticateResponse, error) {
	a.asked++
	return a.answer(r), nil
}

func as(name string, groups ...string) *authnv1.AuthenticateResponse {
	return &authnv1.AuthenticateResponse{
		Authenticated:     true,
		User:              &commonv1.User{Name: name, Groups: groups},
		CacheMilliseconds: 60_000,
	}
}

// Whatever strangers send, nothing of it stays, and nobody who is known is forgotten for it (S2).
func TestStrangersLeaveNothingBehind(t *testing.T) {
	fake := &authn{answer: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		if v := r.Headers["Authorization"].GetValues(); len(v) > 0 && v[0] == "Bearer alice" {
			return as("alice")
		}
		if v := r.Headers["Authorization"].GetValues(); len(v) > 0 && strings.HasPrefix(v[0], "Bearer wrong") {
			return &authnv1.AuthenticateResponse{Error: "no"}
		}
		return as(user.Anonymous, user.AllUnauthenticated)
	}}
	a := NewAuthenticator(fake, []string{"X-Remote-User"}, []string{"X-Remote-Extra-"})
	ask := func(set func(*http.Request)) {
		req := httptest.NewRequest("GET", "/version", nil)
		set(req)
		_, _, _ = a.AuthenticateRequest(req)
	}
	alice := func(req *http.Request) { req.Header.Set("Authorization", "Bearer alice") }
	ask(alice)
	kept := a.known.bytes
	for i := range 3000 {
		ask(func(req *http.Request) {
			req.Header.Set("Authorization", fmt.Sprintf("Basic %d%s", i, strings.Repeat("a", 10_000)))
		})
		ask(func(req *http.Request) { req.Header.Set("Authorization", fmt.Sprint("Bearer wrong", i)) })
		ask(func(req *http.Request) { req.Header.Set("X-Remote-User", fmt.Sprint(i)) })
		ask(func(req *http.Request) {
			req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Raw: []byte(fmt.Sprint(i))}}}
		})
	}
	if a.known.bytes != kept {
		t.Errorf("%d bytes are kept, %d before", a.known.bytes, kept)
	}
	fake.asked = 0
	if ask(alice); fake.asked != 0 {
		t.Error("somebody who is known was forgotten")
	}
}

// An answer for one path says nothing of another: anonymous ones are never kept (S7).
func TestAnAnonymousAnswerIsOfItsPathAlone(t *testing.T) {
	fake := &authn{answer: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		if r.Path == "/healthz" {
			return as(user.Anonymous, user.AllUnauthenticated)
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

// What authn replaces is replaced, also by an answer that was kept; and every value of a header is asked about.
func TestCredentialsAreTakenOut(t *testing.T) {
	fake := &authn{answer: func(r *authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		out := as("alice")
		out.ReplacedHeaders = map[string]*commonv1.Values{
			"Authorization":          {},
			"Sec-Websocket-Protocol": {Values: []string{"v4.channel.k8s.io"}},
		}
		if len(r.Headers["Sec-Websocket-Protocol"].GetValues()) != 2 {
			t.Errorf("asked with %v", r.Headers)
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
	if fake.asked != 1 {
		t.Errorf("asked %d times", fake.asked)
	}
}

// A decision that names no generation is kept for as long as it says, and one that says nothing is not kept (S3).
func TestADecisionIsKeptOnlyAsLongAsItSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &policy{answer: &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, Replica: "a"}}
		a := &Authorizer{Client: p}
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		ask := func(attrs authorizer.Attributes) int {
			before := p.asked
			_, _, _ = a.Authorize(t.Context(), attrs)
			return p.asked - before
		}
		ask(asking("webhook", "get"))
		if ask(asking("webhook", "get")) != 1 {
			t.Error("a decision of no generation is kept")
		}
		p.answer.CacheMilliseconds = 1000
		ask(asking("timed", "get"))
		if ask(asking("timed", "get")) != 0 {
			t.Error("one that may be kept for a second is not")
		}
		time.Sleep(2 * time.Second)
		if ask(asking("timed", "get")) != 1 {
			t.Error("one that may be kept for a second is kept for longer")
		}
		p.answer.CacheMilliseconds, p.answer.PolicyRevision = 0, 5
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a", Heartbeat: true}, false)
		stranger := authorizer.AttributesRecord{
			User: &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}},
			Verb: "get",
			Path: "/x",
		}
		ask(stranger)
		if ask(stranger) != 1 {
			t.Error("a stranger's decision is kept")
		}
		p.answer.EvaluationError = "the webhook does not answer"
		ask(asking("erring", "get"))
		if ask(asking("erring", "get")) != 1 {
			t.Error("a decision is kept though an authorizer erred")
		}
	})
}

// A replica that is frozen says nothing; what it has decided is not kept for longer than its lease (S23).
func TestNothingIsKeptOfAReplicaThatIsNotHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &policy{answer: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "a",
		}}
		a := &Authorizer{Client: p}
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		_, _, _ = a.Authorize(t.Context(), asking("bob", "get"))
		time.Sleep(2 * time.Second)
		if _, _, _ = a.Authorize(t.Context(), asking("bob", "get")); p.asked != 1 {
			t.Errorf("asked %d times", p.asked)
		}
		time.Sleep(2 * time.Second)
		if _, _, _ = a.Authorize(t.Context(), asking("bob", "get")); p.asked != 2 {
			t.Errorf("a frozen replica's decision is kept: asked %d times", p.asked)
		}
	})
}

func in(namespace, name, verb string) authorizer.Attributes {
	return authorizer.AttributesRecord{
		User:            &user.DefaultInfo{Name: name},
		Verb:            verb,
		ResourceRequest: true,
		Resource:        "pods",
		Namespace:       namespace,
	}
}

// What changes in one namespace touches no other's decisions and watches; what is only given voids no permission (S12).
func TestOneNamespacesPolicyIsItsOwn(t *testing.T) {
	p := &policy{answer: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	asked := func(attrs authorizer.Attributes) bool {
		before := p.asked
		_, _, _ = a.Authorize(t.Context(), attrs)
		return p.asked > before
	}
	woken := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	asked(in("mine", "bob", "get"))
	asked(in("other", "bob", "get"))
	mine, other, cluster := a.Moved("mine"), a.Moved("other"), a.Moved("")
	a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Namespace: "mine"}, false)
	if asked(in("mine", "bob", "get")) || woken(mine) {
		t.Error("a permission that was given voids another")
	}
	p.answer.PolicyRevision = 7
	a.moved(&authzv1.PolicyRevision{Revision: 7, Replica: "a", Namespace: "mine", MayRevoke: true}, false)
	if !asked(in("mine", "bob", "get")) || !woken(mine) {
		t.Error("a permission that was taken away stands")
	}
	if asked(in("other", "bob", "get")) || woken(other) || woken(cluster) {
		t.Error("another namespace is touched")
	}
	p.answer.PolicyRevision = 8
	a.moved(&authzv1.PolicyRevision{Revision: 8, Replica: "a", MayRevoke: true}, false)
	if !asked(in("mine", "bob", "get")) || !asked(in("other", "bob", "get")) || !woken(other) || !woken(cluster) {
		t.Error("what is everybody's is not")
	}
	p.answer.Decision = authzv1.Decision_DECISION_UNSPECIFIED
	asked(in("mine", "eve", "get"))
	a.moved(&authzv1.PolicyRevision{Revision: 9, Replica: "a", Namespace: "mine"}, false)
	if !asked(in("mine", "eve", "get")) {
		t.Error("a refusal stands though a permission was given")
	}
}

// A watch whose permission cannot be asked is asked about again, and ends after a bound (S11).
func TestAWatchThatNobodyCanSettleEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &policy{answer: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "another",
		}}
		a := &Authorizer{Client: p}
		a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a"}, true)
		began := time.Now()
		if a.Still(t.Context(), asking("bob", "watch")) {
			t.Error("it goes on")
		}
		took := time.Since(began)
		synctest.Wait() // for the last question, which nobody waits for any more
		if took < stillBound || took > stillBound+time.Second || p.asked < 5 {
			t.Errorf("after %v and %d questions", took, p.asked)
		}
		go func() {
			time.Sleep(time.Second)
			a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Heartbeat: true}, false)
			p.set(&authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, PolicyRevision: 6, Replica: "a"})
		}()
		if !a.Still(t.Context(), asking("bob", "watch")) {
			t.Error("it ends though it is allowed")
		}
	})
}

// silent is an authz whose stream of generations ends and cannot be opened again.
type silent struct {
	policy
	opened int
	waits  bool
}

func (s *silent) PolicyRevisions(_ context.Context, _ *authzv1.PolicyRevisionsRequest,
	opts ...grpc.CallOption) (grpc.ServerStreamingClient[authzv1.PolicyRevision], error) {
	s.opened++
	s.waits = true
	for _, o := range opts {
		if f, ok := o.(grpc.FailFastCallOption); ok && f.FailFast {
			s.waits = false
		}
	}
	return nil, status.Error(codes.Unavailable, "away")
}

// While no authz is heard of, open watches are asked about after a while, once; whoever cannot be told is ended by
// Still (S11).
func TestOpenWatchesAreAskedAboutWhileAuthzIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &silent{}
		a := &Authorizer{Client: s}
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		moved := a.Moved("x")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { a.Run(ctx); close(done) }()
		began := time.Now()
		<-moved
		if took := time.Since(began); took < silenceBound || took > silenceBound+2*time.Second {
			t.Errorf("after %v", took)
		}
		select {
		case <-a.Moved("x"):
			t.Error("they are asked about again and again")
		case <-time.After(time.Minute):
		}
		cancel()
		<-done
		if s.waits || s.opened < 100 {
			t.Errorf("it waits for authz to be back: %v, opened %d times", s.waits, s.opened)
		}
	})
}

// What no generation tells of is not kept, and an open watch believes it of the replica alone that has seen what has
// changed.
func TestATransientDecisionIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &policy{answer: &authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 5,
			Replica:        "a",
			Transient:      true,
		}}
		a := &Authorizer{Client: p}
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		for want := 1; want < 3; want++ {
			if _, _, err := a.Authorize(t.Context(), asking("bob", "get")); err != nil || p.asked != want {
				t.Errorf("asked %d times: %v", p.asked, err)
			}
		}
		if !a.Still(t.Context(), asking("bob", "watch")) {
			t.Error("it ends though it is allowed")
		}
		p.set(&authzv1.AuthorizeResponse{
			Decision:       authzv1.Decision_DECISION_ALLOW,
			PolicyRevision: 90,
			Replica:        "b",
			Transient:      true,
		})
		a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
		if a.Still(t.Context(), asking("bob", "watch")) {
			t.Error("a replica is believed that may not have seen what has changed")
		}
	})
}

// A user is not believed whose groups or scopes came in headers that authn reads and this gateway did not pass on, also
// where the answer to the rest is known (S26).
func TestAHeaderThatIsNotPassedOnIsNoneTheLess(t *testing.T) {
	fake := &authn{answer: func(*authnv1.AuthenticateRequest) *authnv1.AuthenticateResponse {
		out := as("proxied")
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
