// Package access asks authn who a request is of and authz what they may do, and keeps the answers for as long as those
// say.
package access

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
	// decisionBytes bounds the decisions that are kept, and decisionShare those of one user.
	decisionBytes = 64 << 20
	decisionShare = 4 << 20
	// maxScopes bounds the namespaces whose generations are told apart; past it all count as one.
	maxScopes = 20000
)

// Authorizer asks authz, and keeps its decisions until the policy's generation moves in their scope, or for as long as
// authz says.
type Authorizer struct {
	Client authzv1.AuthzClient

	once      sync.Once
	decisions *cache[decision]
	// asking shares questions about open watches: one that began before a permission was taken away answers nobody who
	// asks after it.
	asking coalesce.Group[decision]

	mu sync.RWMutex
	// replica counts the generations, and was heard of last at lastMessage. Empty: nobody tells of changes, and nothing
	// may be kept.
	replica     string
	lastMessage time.Time
	// all is the policy of the whole cluster, spaces that of namespaces.
	all    scope
	spaces map[string]scope
	// changed, by namespace, is closed when permissions there may have been taken away; "" is for what is no
	// namespace's.
	changed map[string]chan struct{}
}

// scope is where a policy stands.
type scope struct {
	// any is its newest generation, and revoked the newest that may have taken a permission away.
	any, revoked uint64
}

func (s scope) moved(g *authzv1.PolicyRevision) scope {
	s.any = max(s.any, g.Revision)
	if g.MayRevoke {
		s.revoked = s.any
	}
	return s
}

// decision is what authz said. It does not change.
type decision struct {
	decision   authorizer.Decision
	reason     string
	replica    string
	generation uint64
	namespace  string
	// transient: it may not be kept.
	transient bool
}

func (a *Authorizer) cache() *cache[decision] {
	a.once.Do(func() {
		a.decisions = newCache[decision](decisionBytes, decisionShare, cacheBytes.WithLabelValues("authz"))
	})
	return a.decisions
}

// Run learns of the policy's changes until ctx is done.
func (a *Authorizer) Run(ctx context.Context) {
	go a.checkSilence(ctx)
	open := func(ctx context.Context) (grpc.ServerStreamingClient[authzv1.PolicyRevision], error) {
		// It must not wait for an authz that is away: nobody is heard of meanwhile.
		return a.Client.PolicyRevisions(ctx, &authzv1.PolicyRevisionsRequest{}, grpc.WaitForReady(false))
	}
	rpc.RetryWatch(ctx, followPause, open, a.moved, func(error) { a.moved(nil, false) })
	a.moved(nil, false)
}

// followPause is how long to wait before authz is asked for its generations again.
const followPause = 100 * time.Millisecond

// checkSilence looks whether anybody is heard of, until ctx is done.
func (a *Authorizer) checkSilence(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.expireSilence()
		}
	}
}

// silenceBound is how long Generations may be silent before open watches are authorized again.
const silenceBound = 20 * time.Second

// expireSilence has open watches asked about where nobody has told of the policy for long: a permission may have been
// taken away.
func (a *Authorizer) expireSilence() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lastMessage.IsZero() && time.Since(a.lastMessage) > silenceBound {
		a.lastMessage = time.Time{}
		a.wake("")
	}
}

// moved takes note of a generation; nil means that nobody tells of them. The first of a stream is where its replica
// stands.
func (a *Authorizer) moved(g *authzv1.PolicyRevision, first bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g == nil {
		a.replica = ""
		return
	}
	a.lastMessage = time.Now()
	if first || g.Replica != a.replica {
		a.replica, a.all, a.spaces = g.Replica, scope{g.Revision, g.Revision}, map[string]scope{}
		a.wake("")
		return
	}
	if g.Heartbeat {
		return
	}
	_, known := a.spaces[g.Namespace]
	switch {
	case g.Namespace == "":
		a.all = a.all.moved(g)
	case !known && len(a.spaces) >= maxScopes: // too many to tell apart: everything is void, and it begins anew
		a.all, a.spaces = scope{g.Revision, g.Revision}, map[string]scope{}
		a.wake("")
		return
	default:
		a.spaces[g.Namespace] = a.spaces[g.Namespace].moved(g)
	}
	if g.MayRevoke {
		a.wake(g.Namespace)
	}
}

// wake tells those whom a change may concern; the lock is held.
func (a *Authorizer) wake(namespace string) {
	for n, c := range a.changed {
		if namespace == "" || n == namespace {
			close(c)
			delete(a.changed, n)
		}
	}
}

// Moved is closed when permissions in a namespace may have been taken away; "" is for what is no namespace's.
func (a *Authorizer) Moved(namespace string) <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.changed == nil {
		a.changed = map[string]chan struct{}{}
	}
	c := a.changed[namespace]
	if c == nil {
		c = make(chan struct{})
		a.changed[namespace] = c
	}
	return c
}

// stands says whether no change of the policy since a decision was made can alter it.
func (a *Authorizer) stands(d decision) bool {
	if d.generation == 0 { // no policy has a part in it
		return true
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.replica == "" || d.replica != a.replica || time.Since(a.lastMessage) > identity.PolicyRevisionLease {
		return false
	}
	space := a.spaces[d.namespace]
	if d.namespace == "" {
		space = scope{}
	}
	if d.decision == authorizer.DecisionAllow {
		return d.generation >= max(a.all.revoked, space.revoked)
	}
	return d.generation >= max(a.all.any, space.any)
}

const (
	// stillBound is for how long a watch goes on whose permission cannot be asked after it may have been taken away.
	stillBound = 10 * time.Second
	// stillPause and stillMost are how long to wait before it is asked again: longer each time.
	stillPause = 20 * time.Millisecond
	stillMost  = 500 * time.Millisecond
)

// Still authorizes an open watch again. It retries while authz cannot be asked, and answers false after stillBound.
// Many watches that ask the same at once, as they do when the generation has moved, cost authz one question.
func (a *Authorizer) Still(ctx context.Context, attrs authorizer.Attributes) bool {
	k, keepable := keysOf(attrs)
	until := time.Now().Add(stillBound)
	asking, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	for pause := stillPause; ; pause = min(2*pause, stillMost) {
		if keepable {
			if d, ok := a.cached(k); ok { // as when the watch is only now being opened
				return d.decision == authorizer.DecisionAllow
			}
		}
		var d decision
		var err error
		if !keepable {
			d, err = a.ask(asking, attrs)
		} else {
			d, err = a.asking.Get(asking, string(k.this[:]), func(ctx context.Context) (decision, error) {
				return a.ask(ctx, attrs)
			})
		}
		switch {
		case err == nil && d.decision != authorizer.DecisionAllow:
			return false
		case err == nil && a.stands(d):
			return true
		case ctx.Err() != nil:
			return true // nobody is there any more
		case time.Now().After(until):
			unsettledWatches.Inc()
			return false
		}
		select { // it could not be asked, or a replica answered that may not have seen yet what has changed
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// Authorize implements authorizer.Authorizer.
func (a *Authorizer) Authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string, error) {
	k, keepable := keysOf(attrs)
	if keepable {
		if d, ok := a.cached(k); ok {
			telemetry.AddSpanEvent(ctx, "Decision kept", nil)
			return d.decision, d.reason, nil
		}
	}
	resp, err := a.Ask(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	d := decisionOf(resp, attrs)
	if resp.EvaluationError != "" {
		return d.decision, d.reason, errors.New(resp.EvaluationError)
	}
	if keepable && !d.transient && (d.generation != 0 || resp.CacheMilliseconds > 0) &&
		!identity.IsAnonymous(attrs.GetUser()) && a.stands(d) {
		ttl := time.Duration(math.MaxInt64)
		if resp.CacheMilliseconds > 0 {
			ttl = time.Duration(resp.CacheMilliseconds) * time.Millisecond
		}
		until := time.Now().Add(ttl)
		key := k.this
		if k.resource && d.decision == authorizer.DecisionAllow { // others than this one may have the same answer
			switch {
			case resp.WildcardNamespace:
				key, d.namespace = k.everywhere, "" // no namespace's policy has a part in it
			case resp.WildcardName:
				key = k.everyName
			}
		}
		a.cache().put(key, identity.Owner(attrs.GetUser().GetName()), d,
			len(d.reason)+len(d.namespace)+len(d.replica), until)
	}
	return d.decision, d.reason, nil
}

func (a *Authorizer) ask(ctx context.Context, attrs authorizer.Attributes) (decision, error) {
	resp, err := a.Ask(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return decision{}, err
	}
	return decisionOf(resp, attrs), nil
}

func decisionOf(resp *authzv1.AuthorizeResponse, attrs authorizer.Attributes) decision {
	d := decision{
		decision:   identity.Decision(resp.Decision),
		reason:     resp.Reason,
		replica:    resp.Replica,
		generation: resp.PolicyRevision,
		transient:  resp.Transient,
	}
	if attrs.IsResourceRequest() {
		d.namespace = attrs.GetNamespace()
	}
	return d
}

// cached is a decision that stands, if one was made: of every object, of those of the namespace, or of this one.
func (a *Authorizer) cached(k keys) (decision, bool) {
	all := []digest{k.everywhere, k.everyName, k.this}
	if !k.resource {
		all = all[2:]
	}
	for _, key := range all {
		if d, ok := a.cache().get(key); ok && a.stands(d) {
			return d, true
		}
	}
	return decision{}, false
}

// Ask is Authorize in the contract's words. It is not remembered.
func (a *Authorizer) Ask(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authorize(ctx, &authzv1.AuthorizeRequest{Attributes: attrs})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return resp, nil
}

// keys are those under which a decision about a request may be kept: one that holds everywhere, for every name in its
// namespace, or for this request alone. What is no resource has the last alone.
type keys struct {
	everywhere, everyName, this digest
	resource                    bool
}

// keysOf is made of everything that a decision may depend on; ok is false where nothing may be kept: the selectors did
// not parse, or it is all too long.
func keysOf(a authorizer.Attributes) (k keys, ok bool) {
	d := newDigester()
	writeUser(d, a.GetUser())
	d.part(a.GetVerb())
	if !a.IsResourceRequest() {
		d.part("path")
		d.part(a.GetPath())
		k.this, ok = d.sum()
		return k, ok
	}
	k.resource = true
	for _, s := range []string{"resource", a.GetAPIGroup(), a.GetAPIVersion(), a.GetResource(), a.GetSubresource()} {
		d.part(s)
	}
	fields, err := a.GetFieldSelector()
	if err != nil {
		return keys{}, false
	}
	d.number(len(fields))
	for _, f := range fields {
		d.part(f.Field)
		d.part(string(f.Operator))
		d.part(f.Value)
	}
	labels, err := a.GetLabelSelector()
	if err != nil {
		return keys{}, false
	}
	d.number(len(labels))
	for _, l := range labels {
		d.part(l.String())
	}
	k.everywhere = d.sumSoFar()
	d.part(a.GetNamespace())
	k.everyName = d.sumSoFar()
	d.part(a.GetName())
	k.this, ok = d.sum()
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
