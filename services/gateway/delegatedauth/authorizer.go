// Package delegatedauth authenticates requests with authn and authorizes them with authz, and caches both results. It
// does not decide anything itself. It fails closed: if a service does not respond, the request gets an error.
//
// Authorizer.Run needs a goroutine of its own, and starts another for the heartbeat. Requests use both types from any
// goroutine.
package delegatedauth

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

const (
	// authzCacheBytes bounds the cached decisions in bytes, and authzOwnerBytes the decisions of each user.
	authzCacheBytes = 64 << 20
	authzOwnerBytes = 4 << 20
	// maxNamespaces bounds the namespaces with their own policy revisions. If another namespace changes, all cached
	// decisions become invalid and the count starts again.
	maxNamespaces = 20000
)

// Authorizer calls authz and caches its decisions. A decision is valid until the policy revision of its scope changes,
// or until the expiry that authz sets. Revisions come from the stream Authz.PolicyRevisions:
//
//	                 first message                     no message for PolicyRevisionLease
//	no stream ──────────────────────────► current ──────────────────────────────► lease expired
//	    ▲      watches are reauthorized      │  ▲                                  │
//	    └──────── the stream breaks ─────────┘  └─────────── next message ─────────┘
//
// Decisions with a policy revision are cacheable only in the state "current". If no message arrives for
// heartbeatTimeout, in any state, all open watches are reauthorized once.
type Authorizer struct {
	Client authzv1.AuthzClient

	once      sync.Once
	decisions *cache[decision]
	// reauthorizations shares the calls that reauthorize open watches. A watch joins only a call that starts after it,
	// so the response is never from before a revocation.
	reauthorizations coalesce.Group[decision]

	mu sync.RWMutex
	// replica counted the policy revisions below, and lastMessage is the time of its last message. If replica is empty,
	// no stream is open and no decision is cacheable.
	replica     string
	lastMessage time.Time
	// cluster is the revision of the cluster-wide policy, and namespaces of the policy in each namespace.
	cluster    policyRevisions
	namespaces map[string]policyRevisions
	// policyChanged has a channel for each namespace with open watches, and "" for requests without a namespace. A
	// channel closes when a change may have revoked permissions there.
	policyChanged map[string]chan struct{}
}

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

// decision is a response of authz. It is immutable.
type decision struct {
	decision       authorizer.Decision
	reason         string
	replica        string
	policyRevision uint64
	namespace      string
	// transient decisions are not cacheable.
	transient bool
}

func (a *Authorizer) cache() *cache[decision] {
	a.once.Do(func() {
		a.decisions = newCache[decision](authzCacheBytes, authzOwnerBytes, cacheBytes.WithLabelValues("authz"))
	})
	return a.decisions
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
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.expireHeartbeat()
		}
	}
}

// heartbeatTimeout is the time without a message of PolicyRevisions after which open watches are reauthorized.
const heartbeatTimeout = 20 * time.Second

// expireHeartbeat reauthorizes open watches if no message arrived for heartbeatTimeout, because a permission may have
// been revoked.
func (a *Authorizer) expireHeartbeat() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lastMessage.IsZero() && time.Since(a.lastMessage) > heartbeatTimeout {
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

// notify closes the channels of a namespace, or all channels for "". The caller holds the lock.
func (a *Authorizer) notify(namespace string) {
	for n, c := range a.policyChanged {
		if namespace == "" || n == namespace {
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
	if a.replica == "" || d.replica != a.replica || time.Since(a.lastMessage) > identity.PolicyRevisionLease {
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

const (
	// reauthorizeTimeout is how long a watch stays open without a valid decision after its permission may have been
	// revoked.
	reauthorizeTimeout = 10 * time.Second
	// minReauthorizeDelay and maxReauthorizeDelay bound the pause between two attempts. It doubles each time.
	minReauthorizeDelay = 20 * time.Millisecond
	maxReauthorizeDelay = 500 * time.Millisecond
)

// Reauthorize authorizes an open watch again. It retries while authz does not respond, and returns false after
// reauthorizeTimeout. When the policy revision changes, many watches with equal attributes share a single call to
// authz.
func (a *Authorizer) Reauthorize(ctx context.Context, attrs authorizer.Attributes) bool {
	keys, cacheable := newCacheKeys(attrs)
	deadline := time.Now().Add(reauthorizeTimeout)
	callCtx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for delay := minReauthorizeDelay; ; delay = min(2*delay, maxReauthorizeDelay) {
		if cacheable {
			if d, ok := a.cached(keys); ok { // for example, the watch is just opening
				return d.decision == authorizer.DecisionAllow
			}
		}
		var d decision
		var err error
		if !cacheable {
			d, err = a.decide(callCtx, attrs)
		} else {
			d, err = a.reauthorizations.Get(
				callCtx,
				string(keys.exact[:]),
				func(ctx context.Context) (decision, error) {
					return a.decide(ctx, attrs)
				},
			)
		}
		switch {
		case err == nil && d.decision != authorizer.DecisionAllow:
			return false
		case err == nil && a.isCurrent(d):
			return true
		case ctx.Err() != nil:
			return true // the client has left
		case time.Now().After(deadline):
			reauthorizationTimeouts.Inc()
			return false
		}
		select { // authz did not respond, or the replica may not have the newest policy
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// Authorize implements authorizer.Authorizer.
func (a *Authorizer) Authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string, error) {
	keys, cacheable := newCacheKeys(attrs)
	if cacheable {
		if d, ok := a.cached(keys); ok {
			telemetry.AddSpanEvent(ctx, "Decision cached", nil)
			return d.decision, d.reason, nil
		}
	}
	resp, err := a.Decide(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	d := decisionOf(resp, attrs)
	if resp.EvaluationError != "" {
		return d.decision, d.reason, errors.New(resp.EvaluationError)
	}
	if cacheable && !d.transient && (d.policyRevision != 0 || resp.CacheMilliseconds > 0) &&
		!identity.IsAnonymous(attrs.GetUser()) && a.isCurrent(d) {
		ttl := time.Duration(math.MaxInt64)
		if resp.CacheMilliseconds > 0 {
			ttl = time.Duration(resp.CacheMilliseconds) * time.Millisecond
		}
		expiresAt := time.Now().Add(ttl)
		key := keys.exact
		if keys.isResource && d.decision == authorizer.DecisionAllow { // the decision may cover other requests
			switch {
			case resp.WildcardNamespace:
				key, d.namespace = keys.wildcardNamespace, "" // it depends on no namespace's policy
			case resp.WildcardName:
				key = keys.wildcardName
			}
		}
		a.cache().put(key, identity.Owner(attrs.GetUser().GetName()), d,
			len(d.reason)+len(d.namespace)+len(d.replica), expiresAt)
	}
	return d.decision, d.reason, nil
}

func (a *Authorizer) decide(ctx context.Context, attrs authorizer.Attributes) (decision, error) {
	resp, err := a.Decide(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return decision{}, err
	}
	return decisionOf(resp, attrs), nil
}

func decisionOf(resp *authzv1.AuthorizeResponse, attrs authorizer.Attributes) decision {
	d := decision{
		decision:       identity.Decision(resp.Decision),
		reason:         resp.Reason,
		replica:        resp.Replica,
		policyRevision: resp.PolicyRevision,
		transient:      resp.Transient,
	}
	if attrs.IsResourceRequest() {
		d.namespace = attrs.GetNamespace()
	}
	return d
}

// cached returns a valid decision about the request. Its key covers every namespace, every name in the namespace, or
// only this request.
func (a *Authorizer) cached(k cacheKeys) (decision, bool) {
	candidates := []digest{k.wildcardNamespace, k.wildcardName, k.exact}
	if !k.isResource {
		candidates = candidates[2:]
	}
	for _, key := range candidates {
		if d, ok := a.cache().get(key); ok && a.isCurrent(d) {
			return d, true
		}
	}
	return decision{}, false
}

// Decide is Authorize with the types of the contract. It bypasses the cache.
func (a *Authorizer) Decide(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authorize(ctx, &authzv1.AuthorizeRequest{Attributes: attrs})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return resp, nil
}

// cacheKeys are the keys under which a decision may be cached: for every namespace, for every name in the namespace, or
// for this request. A non-resource request has only the key exact.
type cacheKeys struct {
	wildcardNamespace, wildcardName, exact digest
	isResource                             bool
}

// newCacheKeys returns the keys, which cover everything that a decision may depend on. ok is false if the decision is
// not cacheable: a selector does not parse, or the input is too long.
func newCacheKeys(a authorizer.Attributes) (k cacheKeys, ok bool) {
	d := newDigester()
	writeUser(d, a.GetUser())
	d.part(a.GetVerb())
	if !a.IsResourceRequest() {
		d.part("path")
		d.part(a.GetPath())
		k.exact, ok = d.sum()
		return k, ok
	}
	k.isResource = true
	for _, s := range []string{"resource", a.GetAPIGroup(), a.GetAPIVersion(), a.GetResource(), a.GetSubresource()} {
		d.part(s)
	}
	fields, err := a.GetFieldSelector()
	if err != nil {
		return cacheKeys{}, false
	}
	d.number(len(fields))
	for _, f := range fields {
		d.part(f.Field)
		d.part(string(f.Operator))
		d.part(f.Value)
	}
	labels, err := a.GetLabelSelector()
	if err != nil {
		return cacheKeys{}, false
	}
	d.number(len(labels))
	for _, l := range labels {
		d.part(l.String())
	}
	k.wildcardNamespace = d.sumSoFar()
	d.part(a.GetNamespace())
	k.wildcardName = d.sumSoFar()
	d.part(a.GetName())
	k.exact, ok = d.sum()
	return k, ok
}

func writeUser(d *digester, u user.Info) {
	if u == nil {
		d.part("nobody")
		return
	}
	d.part(u.GetName())
	d.part(u.GetUID())
	d.number(len(u.GetGroups()))
	for _, g := range u.GetGroups() {
		d.part(g)
	}
	d.number(len(u.GetExtra()))
	for _, k := range slices.Sorted(maps.Keys(u.GetExtra())) {
		d.part(k)
		d.number(len(u.GetExtra()[k]))
		for _, v := range u.GetExtra()[k] {
			d.part(v)
		}
	}
}
