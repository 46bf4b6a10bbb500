package delegatedauth

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/lifecycle"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

type fakeAuthz struct {
	authzv1.AuthzClient
	mu       sync.Mutex
	response *authzv1.AuthorizeResponse
	calls    int
}

func (p *fakeAuthz) Authorize(context.Context, *authzv1.AuthorizeRequest,
	...grpc.CallOption) (*authzv1.AuthorizeResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	return p.response, nil
}

func (p *fakeAuthz) set(r *authzv1.AuthorizeResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.response = r
}

func podAttributes(name, verb string) authorizer.Attributes {
	return authorizer.AttributesRecord{
		User:            &user.DefaultInfo{Name: name},
		Verb:            verb,
		ResourceRequest: true,
		Resource:        "pods",
	}
}

func TestDecisionsAreCachedUntilPolicyChanges(t *testing.T) {
	p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	expectCalls := func(want int, reason string) {
		t.Helper()
		if d, _, err := a.Authorize(t.Context(), podAttributes("bob", "get")); d != authorizer.DecisionAllow ||
			err != nil {
			t.Fatalf("%v %v", d, err)
		}
		if p.calls != want {
			t.Errorf("%s: %d calls, want %d", reason, p.calls, want)
		}
	}
	expectCalls(1, "the first")
	expectCalls(2, "nothing is cached before the policy revision is known")
	a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	expectCalls(3, "the first with the revision")
	expectCalls(3, "cached")
	a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
	expectCalls(4, "the policy changed")
	expectCalls(5, "its revision is older, so it is not cached")
	p.response.PolicyRevision, p.response.Replica = 9, "b"
	expectCalls(6, "another replica's")
	expectCalls(7, "revisions of another replica cannot be compared")
	a.observe(nil, false)
	p.response.Replica = "a"
	expectCalls(8, "the stream is broken")
	expectCalls(9, "so nothing is cached")
}

// A decision that covers many objects is requested once for all of them, but not for objects that it does not cover.
func TestWildcardDecisionsAreShared(t *testing.T) {
	allow := func(anyName, anyNamespace bool) *authzv1.AuthorizeResponse {
		return &authzv1.AuthorizeResponse{
			Decision: authzv1.Decision_DECISION_ALLOW, PolicyRevision: 5, Replica: "a",
			WildcardName: anyName, WildcardNamespace: anyNamespace, Reason: "one", WildcardReason: "all",
		}
	}
	attributes := func(verb, namespace, name string) authorizer.Attributes {
		return authorizer.AttributesRecord{
			User: &user.DefaultInfo{Name: "bob"}, Verb: verb, ResourceRequest: true, Resource: "pods",
			Namespace: namespace, Name: name,
		}
	}
	for _, x := range []struct {
		answer *authzv1.AuthorizeResponse
		asked  int
		what   string
	}{
		{allow(false, false), 5, "one object"},
		{allow(true, false), 3, "every name in the namespace"}, // the other namespace, and the other verb
		{allow(true, true), 2, "everything"},                   // the other verb
	} {
		p := &fakeAuthz{response: x.answer}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		for _, r := range []authorizer.Attributes{attributes("get", "x", "one"), attributes("get", "x", "two"),
			attributes("get", "x", ""), attributes("get", "y", "one"), attributes("delete", "x", "one"),
			attributes("get", "x", "two")} {
			before := p.calls
			d, reason, err := a.Authorize(t.Context(), r)
			if d != authorizer.DecisionAllow || err != nil {
				t.Fatal(d, err)
			}
			cached, shared := p.calls == before, x.answer.WildcardName
			if want := map[bool]string{true: "all", false: "one"}[cached && shared]; reason != want {
				t.Errorf("%s: the reason for %v is %q, want %q", x.what, r, reason, want)
			}
		}
		if p.calls != x.asked {
			t.Errorf("%s: %d calls, want %d", x.what, p.calls, x.asked)
		}
		a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Namespace: "x", MayRevoke: true}, false)
		before := p.calls
		p.set(&authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_DENY, PolicyRevision: 6, Replica: "a"})
		d, _, _ := a.Authorize(t.Context(), attributes("get", "x", "one"))
		if x.answer.WildcardNamespace != (d == authorizer.DecisionAllow && p.calls == before) {
			t.Errorf("%s: after a namespace's policy change: %v, %d calls", x.what, d, p.calls-before)
		}
		a.observe(&authzv1.PolicyRevision{Revision: 7, Replica: "a", MayRevoke: true}, false)
		if d, _, _ := a.Authorize(t.Context(), attributes("get", "x", "one")); d == authorizer.DecisionAllow {
			t.Errorf("%s: still allowed after a cluster-wide policy change", x.what)
		}
	}
}

// The key of a request with an empty name or namespace differs from every wildcard key.
func TestEmptyNameIsNoWildcard(t *testing.T) {
	keysFor := func(namespace, name string) cacheKeys {
		r := podAttributes("bob", "get").(authorizer.AttributesRecord)
		r.Namespace, r.Name = namespace, name
		k, ok := newCacheKeys(r)
		if !ok {
			t.Fatal("the request is not cacheable")
		}
		return k
	}
	seen := map[digest]string{}
	note := func(d digest, label string) {
		if other, ok := seen[d]; ok && other != label {
			t.Errorf("%s and %s have the same key", other, label)
		}
		seen[d] = label
	}
	for _, namespace := range []string{"", "x", "every name", "everywhere", "\xff\xff\xff\xff"} {
		for _, name := range []string{"", "x", "every name", "everywhere", "\xff\xff\xff\xff"} {
			k := keysFor(namespace, name)
			note(k.wildcardNamespace, "everywhere")
			note(k.wildcardName, "every name in "+namespace)
			note(k.exact, namespace+"/"+name)
		}
	}
}

// A cached decision also reauthorizes a watch that is opening. It does not after a policy change.
func TestReauthorizeUsesCachedDecision(t *testing.T) {
	p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	if _, _, err := a.Authorize(t.Context(), podAttributes("bob", "watch")); err != nil {
		t.Fatal(err)
	}
	if !a.Reauthorize(t.Context(), podAttributes("bob", "watch")) || p.calls != 1 {
		t.Errorf("%d calls", p.calls)
	}
	p.response = &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_DENY, PolicyRevision: 6, Replica: "a"}
	a.observe(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
	if a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
		t.Error("a revoked permission is still allowed")
	}
}

// BenchmarkCachedDecision measures the cost of a cached decision, which each request pays.
func BenchmarkCachedDecision(b *testing.B) {
	a := &Authorizer{Client: &fakeAuthz{response: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}}
	a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	r := podAttributes("system:serviceaccount:kube-system:deployment-controller", "get").(authorizer.AttributesRecord)
	r.User.(*user.DefaultInfo).Groups = []string{"system:serviceaccounts", "system:authenticated"}
	r.Namespace, r.Name = "x", "one"
	for b.Loop() {
		if d, _, err := a.Authorize(b.Context(), r); d != authorizer.DecisionAllow {
			b.Fatal(err)
		}
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

// A decision without the opinion of a failed webhook is not a denial. Reauthorize retries until the webhook responds,
// or until the timeout ends the watch.
func TestReauthorizationRetriesWhileAnAuthorizerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeAuthz{response: &authzv1.AuthorizeResponse{
			PolicyRevision:  5,
			Replica:         "a",
			Transient:       true,
			EvaluationError: "the webhook does not respond",
		}}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		began := time.Now()
		if a.Reauthorize(t.Context(), podAttributes("bob", "watch")) || time.Since(began) < reauthorizeTimeout {
			t.Errorf("the watch goes on, or ends after %v", time.Since(began))
		}
		go func() {
			time.Sleep(time.Second) // of synctest's clock
			a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a", Heartbeat: true}, false)
			p.set(&authzv1.AuthorizeResponse{
				Decision:       authzv1.Decision_DECISION_ALLOW,
				PolicyRevision: 5,
				Replica:        "a",
				Transient:      true,
			})
		}()
		if !a.Reauthorize(t.Context(), podAttributes("bob", "watch")) {
			t.Error("the watch ends although the webhook allows it again")
		}
	})
}

// webhookTime is how long upstream's webhooks wait for a response.
const webhookTime = 30 * time.Second

// webhookAuthz decides after its webhook has timed out.
type webhookAuthz struct{ authzv1.AuthzClient }

func (webhookAuthz) Authorize(ctx context.Context, _ *authzv1.AuthorizeRequest,
	_ ...grpc.CallOption) (*authzv1.AuthorizeResponse, error) {
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW}, lifecycle.Sleep(ctx, webhookTime)
}

// authz decides by its webhook's failurePolicy after the webhook has timed out. The gateway waits for this decision.
func TestAuthorizationWaitsForAWebhook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &Authorizer{Client: webhookAuthz{}}
		if d, _, err := a.Authorize(t.Context(), podAttributes("bob", "get")); d != authorizer.DecisionAllow ||
			err != nil {
			t.Errorf("%v, %v", d, err)
		}
	})
}

// Thousands of watches of a user are reauthorized with few calls at a time, and another user's watch does not wait for
// them. Calls that no watches share count too.
func TestReauthorizationsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &slowAuthz{}
		a := &Authorizer{Client: p}
		a.observe(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		reauthorize := func(user, name string) {
			attrs := podAttributes(user, "watch").(authorizer.AttributesRecord)
			attrs.Name = name
			if !a.Reauthorize(t.Context(), attrs) {
				t.Errorf("%s: a watch ends", user)
			}
		}
		began, quiet := time.Now(), time.Duration(0)
		var watches sync.WaitGroup
		for i := range 2000 {
			watches.Go(func() { reauthorize("loud", fmt.Sprint(i)) })
			watches.Go(func() { reauthorize("loud", strings.Repeat("x", 20_000)) }) // it has no key
		}
		synctest.Wait()
		watches.Go(func() {
			reauthorize("quiet", "q")
			quiet = time.Since(began)
		})
		watches.Wait()
		if p.most > maxOwnReauthorizations+1 || quiet > authzDelay {
			t.Errorf("%d calls at a time, the other user's after %v", p.most, quiet)
		}
	})
}

// slowAuthz allows everything after authzDelay, and records the most calls in flight.
type slowAuthz struct {
	authzv1.AuthzClient
	mu             sync.Mutex
	inFlight, most int
}

const authzDelay = 10 * time.Millisecond

func (p *slowAuthz) Authorize(context.Context, *authzv1.AuthorizeRequest,
	...grpc.CallOption) (*authzv1.AuthorizeResponse, error) {
	p.mu.Lock()
	p.inFlight++
	p.most = max(p.most, p.inFlight)
	p.mu.Unlock()
	time.Sleep(authzDelay)
	p.mu.Lock()
	p.inFlight--
	p.mu.Unlock()
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, PolicyRevision: 5, Replica: "a"}, nil
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
