package delegatedauth

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// policyRevisions is the state of a policy.
type policyRevisions struct {
	// latest is the newest revision. revoked is the newest revision that may have revoked a permission.
	latest, revoked uint64
}

func (s policyRevisions) observe(g *authzv1.PolicyRevision) policyRevisions {
	s.latest = max(s.latest, g.Revision)
	if g.MayRevoke {
		s.revoked = s.latest
	}
	return s
}

// Run receives policy revisions until ctx ends.
func (a *Authorizer) Run(ctx context.Context) {
	go a.checkHeartbeats(ctx)
	open := func(ctx context.Context) (grpc.ServerStreamingClient[authzv1.PolicyRevision], error) {
		// The call fails at once if authz is unavailable. Otherwise the authorizer would wait without messages and
		// without an error.
		return a.Client.PolicyRevisions(ctx, &authzv1.PolicyRevisionsRequest{}, grpc.WaitForReady(false))
	}
	rpc.RetryWatch(ctx, revisionsRetryInterval, open, a.observe, func(error) { a.observe(nil, false) })
	a.observe(nil, false)
}

// revisionsRetryInterval is the pause before the stream of policy revisions is opened again.
const revisionsRetryInterval = 100 * time.Millisecond

// checkHeartbeats calls expireHeartbeat every second until ctx ends.
func (a *Authorizer) checkHeartbeats(ctx context.Context) {
	for lifecycle.Sleep(ctx, time.Second) == nil {
		a.expireHeartbeat()
	}
}

// heartbeatTimeout is the time without a message of PolicyRevisions after which open watches are reauthorized.
const heartbeatTimeout = 20 * time.Second

// expireHeartbeat reauthorizes open watches if no message arrived for heartbeatTimeout, because a permission may have
// been revoked.
func (a *Authorizer) expireHeartbeat() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lastMessage.IsZero() && lifecycle.Age(a.lastMessage) > heartbeatTimeout {
		a.lastMessage = time.Time{}
		a.notify("")
	}
}

// observe records a policy revision. A nil revision means that the stream is broken. first marks the first message of a
// stream, which has the current revision of its replica.
func (a *Authorizer) observe(g *authzv1.PolicyRevision, first bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g == nil {
		a.replica = ""
		return
	}
	a.lastMessage = time.Now()
	if first {
		a.rejectsAnonymous = g.RejectsAnonymous
	}
	if first || g.Replica != a.replica {
		a.replica, a.cluster, a.namespaces = g.Replica, policyRevisions{
			g.Revision,
			g.Revision,
		}, map[string]policyRevisions{}
		a.notify("")
		return
	}
	if g.Heartbeat {
		return
	}
	_, known := a.namespaces[g.Namespace]
	switch {
	case g.Namespace == "":
		a.cluster = a.cluster.observe(g)
	case !known && len(a.namespaces) >= maxNamespaces: // too many namespaces
		a.cluster, a.namespaces = policyRevisions{g.Revision, g.Revision}, map[string]policyRevisions{}
		a.notify("")
		return
	default:
		a.namespaces[g.Namespace] = a.namespaces[g.Namespace].observe(g)
	}
	if g.MayRevoke {
		a.notify(g.Namespace)
	}
}

// RejectsAnonymous reports whether clients must have credentials, by the last stream of policy revisions. authz rejects
// clients without credentials too, if no stream has opened yet.
func (a *Authorizer) RejectsAnonymous() bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.rejectsAnonymous
}

// otherNamespaces is the key of the channel that namespaces beyond maxNamespaces share.
const otherNamespaces = "\x00"

// notify closes the channels of a namespace, or all channels for "". The caller holds the lock.
func (a *Authorizer) notify(namespace string) {
	for n, c := range a.policyChanged {
		if namespace == "" || n == namespace || n == otherNamespaces {
			close(c)
			delete(a.policyChanged, n)
		}
	}
}

// PolicyChanged returns a channel that closes when permissions in a namespace may have been revoked. The namespace ""
// stands for requests without a namespace.
func (a *Authorizer) PolicyChanged(namespace string) <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.policyChanged == nil {
		a.policyChanged = map[string]chan struct{}{}
	}
	c := a.policyChanged[namespace]
	if c == nil && len(a.policyChanged) >= maxNamespaces { // clients name them, and they may not exist
		namespace = otherNamespaces
		c = a.policyChanged[namespace]
	}
	if c == nil {
		c = make(chan struct{})
		a.policyChanged[namespace] = c
	}
	return c
}

// isCurrent reports whether no policy change since a decision can alter it.
func (a *Authorizer) isCurrent(d decision) bool {
	if d.policyRevision == 0 { // it depends on no policy
		return true
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.replica == "" || d.replica != a.replica || lifecycle.Age(a.lastMessage) > identity.PolicyRevisionLease {
		return false
	}
	revisions := a.namespaces[d.namespace]
	if d.namespace == "" {
		revisions = policyRevisions{}
	}
	if d.decision == authorizer.DecisionAllow {
		return d.policyRevision >= max(a.cluster.revoked, revisions.revoked)
	}
	return d.policyRevision >= max(a.cluster.latest, revisions.latest)
}
