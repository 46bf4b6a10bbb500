package access

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

type policy struct {
	authzv1.AuthzClient
	mu     sync.Mutex
	answer *authzv1.AuthorizeResponse
	asked  int
}

func (p *policy) Authorize(context.Context, *authzv1.AuthorizeRequest,
	...grpc.CallOption) (*authzv1.AuthorizeResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	return p.answer, nil
}

func (p *policy) set(r *authzv1.AuthorizeResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = r
}

func asking(name, verb string) authorizer.Attributes {
	return authorizer.AttributesRecord{
		User:            &user.DefaultInfo{Name: name},
		Verb:            verb,
		ResourceRequest: true,
		Resource:        "pods",
	}
}

func TestDecisionsAreKeptUntilThePolicyMoves(t *testing.T) {
	p := &policy{answer: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	ask := func(want int, why string) {
		t.Helper()
		if d, _, err := a.Authorize(t.Context(), asking("bob", "get")); d != authorizer.DecisionAllow || err != nil {
			t.Fatalf("%v %v", d, err)
		}
		if p.asked != want {
			t.Errorf("%s: asked %d times, want %d", why, p.asked, want)
		}
	}
	ask(1, "the first")
	ask(2, "nothing is kept before the generation is known")
	a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	ask(3, "the first of the generation")
	ask(3, "kept")
	a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
	ask(4, "the policy moved")
	ask(5, "made at an older generation, so not kept")
	p.answer.PolicyRevision, p.answer.Replica = 9, "b"
	ask(6, "another replica's")
	ask(7, "another replica's generations mean nothing here")
	a.moved(nil, false)
	p.answer.Replica = "a"
	ask(8, "nobody tells of changes")
	ask(9, "so nothing is kept")
}

func TestDecisionsAreOfOneRequestAlone(t *testing.T) {
	seen := map[digest]authorizer.Attributes{}
	for _, r := range []authorizer.Attributes{asking("bob", "get"), asking("bob", "list"),
		asking("bo", "bget"), asking("", "bobget"),
		authorizer.AttributesRecord{
			User:            &user.DefaultInfo{Name: "bob", Groups: []string{"get"}},
			ResourceRequest: true,
			Resource:        "pods",
		},
		authorizer.AttributesRecord{User: &user.DefaultInfo{Name: "bob"}, Verb: "get", Path: "/x"}} {
		keys, keepable := keysOf(r)
		k := keys.this
		if !keepable {
			t.Errorf("%v is not kept", r)
		}
		if other, ok := seen[k]; ok {
			t.Errorf("%v and %v are kept as one", r, other)
		}
		seen[k] = r
	}
}

// Who walks many objects is asked about once, where what is decided holds for all of them, and no further than that.
func TestADecisionHoldsAsFarAsItSays(t *testing.T) {
	allow := func(anyName, anyNamespace bool) *authzv1.AuthorizeResponse {
		return &authzv1.AuthorizeResponse{
			Decision: authzv1.Decision_DECISION_ALLOW, PolicyRevision: 5, Replica: "a",
			WildcardName: anyName, WildcardNamespace: anyNamespace,
		}
	}
	of := func(verb, namespace, name string) authorizer.Attributes {
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
		p := &policy{answer: x.answer}
		a := &Authorizer{Client: p}
		a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
		for _, r := range []authorizer.Attributes{of("get", "x", "one"), of("get", "x", "two"), of("get", "x", ""),
			of("get", "y", "one"), of("delete", "x", "one"), of("get", "x", "two")} {
			if d, _, err := a.Authorize(t.Context(), r); d != authorizer.DecisionAllow || err != nil {
				t.Fatal(d, err)
			}
		}
		if p.asked != x.asked {
			t.Errorf("%s: asked %d times, want %d", x.what, p.asked, x.asked)
		}
		a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", Namespace: "x", MayRevoke: true}, false)
		before := p.asked
		p.set(&authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_DENY, PolicyRevision: 6, Replica: "a"})
		d, _, _ := a.Authorize(t.Context(), of("get", "x", "one"))
		if x.answer.WildcardNamespace != (d == authorizer.DecisionAllow && p.asked == before) {
			t.Errorf("%s: a namespace's policy has moved: %v, asked %d times", x.what, d, p.asked-before)
		}
		a.moved(&authzv1.PolicyRevision{Revision: 7, Replica: "a", MayRevoke: true}, false)
		if d, _, _ := a.Authorize(t.Context(), of("get", "x", "one")); d == authorizer.DecisionAllow {
			t.Errorf("%s: everybody's policy has moved, and it is still allowed", x.what)
		}
	}
}

// No name and no namespace makes a request's own key that of a wider decision.
func TestNoNameStandsForAll(t *testing.T) {
	of := func(namespace, name string) keys {
		r := asking("bob", "get").(authorizer.AttributesRecord)
		r.Namespace, r.Name = namespace, name
		k, ok := keysOf(r)
		if !ok {
			t.Fatal("nothing is kept")
		}
		return k
	}
	seen := map[digest]string{}
	note := func(d digest, what string) {
		if other, ok := seen[d]; ok && other != what {
			t.Errorf("%s and %s are kept as one", other, what)
		}
		seen[d] = what
	}
	for _, namespace := range []string{"", "x", "every name", "everywhere", "\xff\xff\xff\xff"} {
		for _, name := range []string{"", "x", "every name", "everywhere", "\xff\xff\xff\xff"} {
			k := of(namespace, name)
			note(k.everywhere, "everywhere")
			note(k.everyName, "every name in "+namespace)
			note(k.this, namespace+"/"+name)
		}
	}
}

// A watch that is opened under a decision that is kept costs no second question; once the policy has moved it does.
func TestWhetherItIsStillAllowedIsAskedOncePerGeneration(t *testing.T) {
	p := &policy{answer: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}
	a := &Authorizer{Client: p}
	a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	if _, _, err := a.Authorize(t.Context(), asking("bob", "watch")); err != nil {
		t.Fatal(err)
	}
	if !a.Still(t.Context(), asking("bob", "watch")) || p.asked != 1 {
		t.Errorf("asked %d times", p.asked)
	}
	p.answer = &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_DENY, PolicyRevision: 6, Replica: "a"}
	a.moved(&authzv1.PolicyRevision{Revision: 6, Replica: "a", MayRevoke: true}, false)
	if a.Still(t.Context(), asking("bob", "watch")) {
		t.Error("a revoked permission is still allowed")
	}
}

// BenchmarkKept is what a decision that is kept costs each request.
func BenchmarkKept(b *testing.B) {
	a := &Authorizer{Client: &policy{answer: &authzv1.AuthorizeResponse{
		Decision:       authzv1.Decision_DECISION_ALLOW,
		PolicyRevision: 5,
		Replica:        "a",
	}}}
	a.moved(&authzv1.PolicyRevision{Revision: 5, Replica: "a"}, true)
	r := asking("system:serviceaccount:kube-system:deployment-controller", "get").(authorizer.AttributesRecord)
	r.User.(*user.DefaultInfo).Groups = []string{"system:serviceaccounts", "system:authenticated"}
	r.Namespace, r.Name = "x", "one"
	for b.Loop() {
		if d, _, err := a.Authorize(b.Context(), r); d != authorizer.DecisionAllow {
			b.Fatal(err)
		}
	}
}
