// Package delegatedauth authenticates requests with authn and authorizes them with authz, and caches both results. It
// does not decide anything itself. It fails closed: if a service does not respond, the request gets an error.
//
// Authorizer.Run needs a goroutine of its own, and starts another for the heartbeat. Requests use both types from any
// goroutine.
package delegatedauth

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/lifecycle"
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
	// decisions become invalid and the count starts again. It also bounds the channels of PolicyChanged: further
	// namespaces share a channel, so their watches are reauthorized at the changes of any namespace.
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
	// so the response is never from before a revocation. Users take turns.
	reauthorizations coalesce.Group[decision]
	// unshared counts the reauthorizations that share no call.
	unshared atomic.Uint64

	mu sync.RWMutex
	// replica counted the policy revisions below, and lastMessage is the time of its last message. If replica is empty,
	// no stream is open and no decision is cacheable.
	replica     string
	lastMessage time.Time
	// rejectsAnonymous is from the first message of the last stream.
	rejectsAnonymous bool
	// cluster is the revision of the cluster-wide policy, and namespaces of the policy in each namespace.
	cluster    policyRevisions
	namespaces map[string]policyRevisions
	// policyChanged has a channel for each namespace with open watches, and "" for requests without a namespace. A
	// channel closes when a change may have revoked permissions there.
	policyChanged map[string]chan struct{}
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

// init makes the cache and the bounds of a zero value.
func (a *Authorizer) init() {
	a.once.Do(func() {
		a.reauthorizations.Limit, a.reauthorizations.PerOwner = maxReauthorizations, maxOwnReauthorizations
		a.decisions = newCache[decision](authzCacheBytes, authzOwnerBytes, cacheBytes.WithLabelValues("authz"))
	})
}

func (a *Authorizer) cache() *cache[decision] {
	a.init()
	return a.decisions
}

const (
	// reauthorizeTimeout is how long a watch stays open without a valid decision after its permission may have been
	// revoked.
	reauthorizeTimeout = 10 * time.Second
	// minReauthorizeDelay and maxReauthorizeDelay bound the pause between two attempts. It doubles each time.
	minReauthorizeDelay = 20 * time.Millisecond
	maxReauthorizeDelay = 500 * time.Millisecond
	// maxReauthorizations bounds the calls in flight that reauthorize watches, and maxOwnReauthorizations the calls of
	// an owner. A change of the cluster's policy concerns all watches: tens of thousands of calls would delay the
	// decisions for requests.
	maxReauthorizations    = 64
	maxOwnReauthorizations = 16
)

// WithAuthorizer returns a handler whose open watches Reauthorize does not reauthorize with authz: own decides instead.
func WithAuthorizer(h http.Handler, own authorizer.Authorizer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), ownAuthorizerKey{}, own)))
	})
}

type ownAuthorizerKey struct{}

// Reauthorize authorizes an open watch again. It retries while authz does not respond or an authorizer fails, and
// returns false after reauthorizeTimeout. When the policy revision changes, many watches with equal attributes share a
// single call to authz.
func (a *Authorizer) Reauthorize(ctx context.Context, attrs authorizer.Attributes) bool {
	if own, ok := ctx.Value(ownAuthorizerKey{}).(authorizer.Authorizer); ok {
		d, _, err := own.Authorize(ctx, attrs)
		return err == nil && d == authorizer.DecisionAllow
	}
	keys, cacheable := newCacheKeys(attrs)
	deadline := time.Now().Add(reauthorizeTimeout)
	callCtx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	a.init()
	shared := cacheable && !impersonates(ctx) // a shared call has a context without the client
	owner, name := reauthorizationOwner(attrs.GetUser().GetName()), string(keys.exact[:])
	if !shared {
		name = "#" + strconv.FormatUint(a.unshared.Add(1), 10)
	}
	for delay := minReauthorizeDelay; ; delay = min(2*delay, maxReauthorizeDelay) {
		if cacheable {
			if d, ok := a.cached(keys); ok { // for example, the watch is just opening
				return d.decision == authorizer.DecisionAllow
			}
		}
		d, err := a.reauthorizations.GetFor(callCtx, owner, name, func(ctx context.Context) (decision, error) {
			if !shared {
				ctx = callCtx
			}
			return a.decide(ctx, attrs)
		})
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
		_ = lifecycle.Sleep(ctx, delay) // authz did not respond, or the replica may not have the newest policy
	}
}

// reauthorizationOwner returns the owner whose turn the reauthorization of a user's watch takes. The cluster depends on
// the service accounts of kube-system, so each has turns of its own.
func reauthorizationOwner(user string) string {
	if strings.HasPrefix(user, "system:serviceaccount:kube-system:") {
		return user
	}
	return identity.Owner(user)
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
		key, kept := keys.exact, d
		if keys.isResource && d.decision == authorizer.DecisionAllow { // the decision may cover other requests
			switch {
			case resp.WildcardNamespace:
				key, kept.namespace = keys.wildcardNamespace, "" // it depends on no namespace's policy
			case resp.WildcardName:
				key = keys.wildcardName
			}
			if key != keys.exact {
				kept.reason = cmp.Or(resp.WildcardReason, d.reason)
			}
		}
		a.cache().put(key, identity.Owner(attrs.GetUser().GetName()), kept,
			len(kept.reason)+len(kept.namespace)+len(kept.replica), expiresAt)
	}
	return d.decision, d.reason, nil
}

// decide returns authz' decision. It returns an error if an authorizer failed that might have allowed the request.
func (a *Authorizer) decide(ctx context.Context, attrs authorizer.Attributes) (decision, error) {
	resp, err := a.Decide(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return decision{}, err
	}
	d := decisionOf(resp, attrs)
	if d.decision != authorizer.DecisionAllow && resp.EvaluationError != "" {
		return decision{}, errors.New(resp.EvaluationError)
	}
	return d, nil
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

// isClientAuthenticated reports whether the client of a request has authenticated. The user of the context is the
// client, or the user that the client impersonates. It fails closed: a context without a client is not authenticated.
func isClientAuthenticated(ctx context.Context) bool {
	u, ok := request.UserFrom(ctx)
	return impersonates(ctx) || ok && !identity.IsAnonymous(u)
}

// Decide is Authorize with the types of the contract. It bypasses the cache.
func (a *Authorizer) Decide(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authorize(ctx, &authzv1.AuthorizeRequest{
		Attributes:          attrs,
		ClientAuthenticated: isClientAuthenticated(ctx),
	})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return resp, nil
}
