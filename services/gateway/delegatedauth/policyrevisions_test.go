package delegatedauth

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

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
		case <-time.After(2 * time.Minute):
		}
		cancel()
		<-done
		if s.waitForReady || s.opened < 100 {
			t.Errorf("it waits for a ready authz: %v, opened %d times", s.waitForReady, s.opened)
		}
	})
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Beyond maxNamespaces, namespaces share a channel. Unlike others, it closes at the changes of any namespace.
func TestWatchedNamespacesAreBounded(t *testing.T) {
	a := &Authorizer{}
	first := a.PolicyChanged("first")
	for i := range 2 * maxNamespaces {
		a.PolicyChanged(fmt.Sprint("ns-", i))
	}
	if n := len(a.policyChanged); n > maxNamespaces+1 {
		t.Errorf("%d channels exist", n)
	}
	beyond := a.PolicyChanged("beyond")
	a.notify("other")
	if isClosed(first) || !isClosed(beyond) {
		t.Error("a change of another namespace closes the first channel, or not the shared channel")
	}
	if a.PolicyChanged("first") != first || isClosed(a.PolicyChanged("beyond")) {
		t.Error("the first channel is gone, or the shared channel stays closed")
	}
}
