package server

import (
	"context"
	"net/http"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/filters/impersonation"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericfeatures "k8s.io/apiserver/pkg/features"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/paths"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/flowcontrol"
	"watershed.dev/services/gateway/responsewriters"
)

// LongRunning reports whether a request has no time limit.
var LongRunning = genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"),
	sets.NewString("attach", "exec", "proxy", "log", "portforward"))

// ChainConfig holds the parts of a gateway that the filters use.
type ChainConfig struct {
	Authn   *delegatedauth.Authenticator
	Authz   *delegatedauth.Authorizer
	Auditor *audit.Auditor
	// Fairness is nil if API Priority and Fairness is off.
	Fairness *flowcontrol.Fairness
	// BuffersBody reports whether a request's body is read before the request counts as in flight.
	BuffersBody func(*http.Request) bool
	MetricsInfo MetricsInfoFunc
}

// BuildHandlerChain wraps api in the filters, in kube-apiserver's order (k8s.io/apiserver/pkg/server/config.go,
// DefaultBuildHandlerChain).
func (s *Server) BuildHandlerChain(api http.Handler, p ChainConfig) http.Handler {
	c := s.config
	auditor := p.Auditor
	h := withFilter("authorization", api, func(h http.Handler) http.Handler {
		return withAuthz(h, p.Authz, authorization)
	})
	h = exemptInternal(s.limited(h, p), h)
	bodies := new(body.Reader) // its quota applies to all bodies
	h = withFilter("body", h, func(h http.Handler) http.Handler { return bodies.ReadAhead(h, p.BuffersBody) })
	h = withFilter("userlimits", h, s.userLimits.filter)
	if utilfeature.DefaultFeatureGate.Enabled(genericfeatures.ConstrainedImpersonation) {
		h = withFilter("constrainedimpersonation", h, func(h http.Handler) http.Handler {
			return withAuthz(h, p.Authz, constrainedImpersonation)
		})
	} else {
		h = withFilter("impersonation", h, func(h http.Handler) http.Handler {
			return withAuthz(h, p.Authz, unconstrainedImpersonation)
		})
	}
	h = withFilter("audit", h, func(h http.Handler) http.Handler { return withAudit(h, auditor) })
	h = withTracing(h)
	h = withLoggedUser(h)
	unauthorizedHandler := genericapifilters.WithFailedAuthenticationAudit(unauthorized{}, auditor.Sink, auditor.Policy)
	h = withFilter("authentication", h, func(h http.Handler) http.Handler {
		return genericapifilters.WithAuthentication(h, authnUnavailable{p.Authn},
			filterEnded("authentication", unauthorizedHandler), authenticator.Audiences(c.APIAudiences), nil)
	})
	h = genericfilters.WithCORS(h, c.CORS, nil, nil, nil, "true")
	h = genericapifilters.WithWarningRecorder(h)
	h = withSteps(h) // inside withTimeout: a handler that has ended names the call in which the deadline passed
	h = withTimeout(h, p.MetricsInfo)
	h = genericapifilters.WithRequestDeadline(h, auditor.Sink, auditor.Policy, LongRunning, responsewriters.Codecs,
		c.RequestTimeout)
	h = genericfilters.WithWaitGroup(h, LongRunning, s.InFlight)
	h = genericfilters.WithWatchTerminationDuringShutdown(s.watches.countEnds(h), s.watches, s.watches)
	if c.GoawayChance > 0 {
		h = genericfilters.WithProbabilisticGoaway(h, c.GoawayChance)
	}
	h = genericapifilters.WithCacheControl(h)
	h = genericfilters.WithHSTS(h, c.HSTS)
	if c.ShutdownSendRetryAfter {
		h = genericfilters.WithRetryAfter(h, s.delayOver)
	}
	h = withHTTPLogging(h)
	h = genericapifilters.WithLatencyTrackers(h)
	h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
	h = genericapifilters.WithRequestReceivedTimestamp(h)
	h = withPanicRecovery(h, p.MetricsInfo)
	return genericapifilters.WithAuditInit(h)
}

// Upstream's filters that authorize requests.
func authorization(h http.Handler, a authorizer.Authorizer) http.Handler {
	return genericapifilters.WithAuthorization(h, a, responsewriters.Codecs)
}

func constrainedImpersonation(h http.Handler, a authorizer.Authorizer) http.Handler {
	return impersonation.WithConstrainedImpersonation(h, a, responsewriters.Codecs)
}

func unconstrainedImpersonation(h http.Handler, a authorizer.Authorizer) http.Handler {
	return impersonation.WithImpersonation(h, a, responsewriters.Codecs)
}

// limited limits the requests to next, by flow control or by the number in flight.
func (s *Server) limited(next http.Handler, p ChainConfig) http.Handler {
	c := s.config
	longRunning := func(req *http.Request, info *request.RequestInfo) bool {
		return LongRunning(req, ownInfo(req.Context(), info))
	}
	return withMetricsInfo(next, p.MetricsInfo, func(h http.Handler) http.Handler {
		if p.Fairness == nil {
			return genericfilters.WithMaxInFlightLimit(h, c.MaxInFlight, c.MaxMutating, longRunning)
		}
		return withFilter("priorityandfairness", h, func(h http.Handler) http.Handler {
			return p.Fairness.Filter(h, longRunning, ownInfo, c.RequestTimeout)
		})
	})
}

// BuildLoopbackChain wraps api for a client within the process, which authz authorizes. Its requests are audited. They
// skip the filters that limit clients. A shutdown does not end its watches (ShutdownStagger).
func BuildLoopbackChain(api http.Handler, authz authorizer.Authorizer, auditor *audit.Auditor) http.Handler {
	h := withAuthz(api, authz, authorization)
	h = genericapifilters.WithAudit(h, auditor.Sink, auditor.Policy, LongRunning)
	h = genericapifilters.WithWarningRecorder(h)
	h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
	h = genericapifilters.WithRequestReceivedTimestamp(h)
	h = genericapifilters.WithAuditInit(h)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), loopbackKey{}, true)))
	})
}

// loopbackKey marks the contexts of requests from within the process.
type loopbackKey struct{}

// withPanicRecovery logs a panic and aborts its response, as kube-apiserver does: a client must not take a partial
// response for the whole. Upstream's filter does not panic again, because platform/process clears runtime.ReallyCrash.
// An abort after the client has left is neither logged nor counted.
func withPanicRecovery(h http.Handler, metricsInfo MetricsInfoFunc) http.Handler {
	filtered := genericfilters.WithPanicRecovery(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer func() {
			err := recover()
			if err == nil {
				return
			}
			responsewriters.Abort(req.Context())
			if err != http.ErrAbortHandler || !clientGone(req) { //nolint:errorlint // a panic's value, not an error
				panic(err)
			}
		}()
		h.ServeHTTP(w, req)
	}), metricsInfoResolver(metricsInfo))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx, aborted := responsewriters.WithAbort(req.Context())
		filtered.ServeHTTP(w, req.WithContext(ctx))
		if aborted() {
			panic(http.ErrAbortHandler)
		}
	})
}

// exemptInternal exempts the system's own services from flow control and the limit of requests in flight, like an
// exempt priority level. Every other request depends on their decisions, so theirs must not queue behind it.
func exemptInternal(limited, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if u, ok := request.UserFrom(req.Context()); ok && slices.Contains(u.GetGroups(), identity.ServicesGroup) {
			next.ServeHTTP(w, req)
			return
		}
		limited.ServeHTTP(w, req)
	})
}
