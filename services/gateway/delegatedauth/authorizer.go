// Package access asks authn who a request is of and authz what they may do, and keeps the answers for as long as those
// say.
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
	// authzCacheBytes bounds the decisions that are kept, and authzOwnerBytes those of one user.
	authzCacheBytes = 64 << 20
	authzOwnerBytes = 4 << 20
	// maxNamespaces bounds the namespaces whose generations are told apart; past it all count as one.
	maxNamespaces = 20000
)

// Authorizer asks authz, and keeps its decisions until the policy's generation moves in their scope, or for as long as
// authz says.
type Authorizer struct {
	Client authzv1.AuthzClient

	once      sync.Once
	decisions *cache[decision]
	// reauthorizations shares questions about open watches: one that began before a permission was taken away answers nobody who
	// asks after it.
	reauthorizations coalesce.Group[decision]

	mu sync.RWMutex
	// replica counts the generations, and was heard of last at lastMessage. Empty: nobody tells of changes, and nothing
	// may be kept.
	replica     string
	lastMessage time.Time
	// cluster is the policy of the whole cluster, spaces that of namespaces.
	cluster    policyRevisions
	namespaces map[string]policyRevisions
	// policyChanged, by namespace, is closed when permissions there may have been taken away; "" is for what is no
	// namespace's.
	policyChanged map[string]chan struct{}
}

// policyRevisions is where a policy stands.
type policyRevisions struct {
	// latest is its newest generation, and revoked the newest that may have taken a permission away.
	latest, revoked uint64
}

func (s policyRevisions) observe(g *authzv1.PolicyRevision) policyRevisions {
	s.latest = max(s.latest, g.Revision)
	if g.MayRevoke {
		s.revoked = s.latest
	}
	return s
}

// decision is what authz said. It does not change.
type decision struct {
	decision       authorizer.Decision
	reason         string
	replica        string
	policyRevision uint64
	namespace      string
	// transient: it may not be kept.
	transient bool
}

func (a *Authorizer) cache() *cache[decision] {
	a.once.Do(func() {
		a.decisions = newCache[decision](authzCacheBytes, authzOwnerBytes, cacheBytes.WithLabelValues("authz"))
	})
	return a.decisions
}

// Run learns of the policy's changes until ctx is done.
func (a *Authorizer) Run(ctx context.Context) {
	go a.checkHeartbeats(ctx)
	open := func(ctx context.Context) (grpc.ServerStreamingClient[authzv1.PolicyRevision], error) {
		// It must not wait for an authz that is away: nobody is heard of meanwhile.
		return a.Client.PolicyRevisions(ctx, &authzv1.PolicyRevisionsRequest{}, grpc.WaitForReady(false))
	}
	rpc.RetryWatch(ctx, revisionsRetryInterval, open, a.observe, func(error) { a.observe(nil, false) })
	a.observe(nil, false)
}

// revisionsRetryInterval is how long to wait before authz is asked for its generations again.
const revisionsRetryInterval = 100 * time.Millisecond

// checkHeartbeats looks whether anybody is heard of, until ctx is done.
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

// heartbeatTimeout is how long Generations may be silent before open watches are authorized again.
const heartbeatTimeout = 20 * time.Second

// expireHeartbeat has open watches asked about where nobody has told of the policy for long: a permission may have been
// taken away.
func (a *Authorizer) expireHeartbeat() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lastMessage.IsZero() && time.Since(a.lastMessage) > heartbeatTimeout {
		a.lastMessage = time.Time{}
		a.notify("")
	}
}

// observe takes note of a generation; nil means that nobody tells of them. The first of a stream is where its replica
// stands.
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
	case !known && len(a.namespaces) >= maxNamespaces: // too many to tell apart: everything is void, and it begins anew
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

// notify tells those whom a change may concern; the lock is held.
func (a *Authorizer) notify(namespace string) {
	for n, c := range a.policyChanged {
		if namespace == "" || n == namespace {
			close(c)
			delete(a.policyChanged, n)
		}
	}
}

// PolicyChanged is closed when permissions in a namespace may have been taken away; "" is for what is no namespace's.
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

// isCurrent says whether no change of the policy since a decision was made can alter it.
func (a *Authorizer) isCurrent(d decision) bool {
	if d.policyRevision == 0 { // no policy has a part in it
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
	// reauthorizeTimeout is for how long a watch goes on whose permission cannot be asked after it may have been taken away.
	reauthorizeTimeout = 10 * time.Second
	// minReauthorizeDelay and maxReauthorizeDelay are how long to wait before it is asked again: longer each time.
	minReauthorizeDelay = 20 * time.Millisecond
	maxReauthorizeDelay = 500 * time.Millisecond
)

// Reauthorize authorizes an open watch again. It retries while authz cannot be asked, and answers false after reauthorizeTimeout.
// Many watches that ask the same at once, as they do when the generation has moved, cost authz one question.
func (a *Authorizer) Reauthorize(ctx context.Context, attrs authorizer.Attributes) bool {
	keys, cacheable := newCacheKeys(attrs)
	deadline := time.Now().Add(reauthorizeTimeout)
	callCtx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for delay := minReauthorizeDelay; ; delay = min(2*delay, maxReauthorizeDelay) {
		if cacheable {
			if d, ok := a.cached(keys); ok { // as when the watch is only now being opened
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
			return true // nobody is there any more
		case time.Now().After(deadline):
			reauthorizationTimeouts.Inc()
			return false
		}
		select { // it could not be asked, or a replica answered that may not have seen yet what has changed
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
			telemetry.AddSpanEvent(ctx, "Decision kept", nil)
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
		if keys.isResource && d.decision == authorizer.DecisionAllow { // others than this one may have the same answer
			switch {
			case resp.WildcardNamespace:
				key, d.namespace = keys.wildcardNamespace, "" // no namespace's policy has a part in it
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

// cached is a decision that stands, if one was made: of every object, of those of the namespace, or of this one.
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

// Decide is Authorize in the contract's words. It is not remembered.
func (a *Authorizer) Decide(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authorize(ctx, &authzv1.AuthorizeRequest{Attributes: attrs})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return resp, nil
}

// cacheKeys are those under which a decision about a request may be kept: one that holds everywhere, for every name in its
// namespace, or for this request alone. What is no resource has the last alone.
type cacheKeys struct {
	wildcardNamespace, wildcardName, exact digest
	isResource                             bool
}

// newCacheKeys is made of everything that a decision may depend on; ok is false where nothing may be kept: the selectors did
// not parse, or it is all too long.
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
