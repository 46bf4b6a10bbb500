package edge

import (
	"context"
	"errors"
	"net/http"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	"watershed.dev/services/gateway/access"
	"watershed.dev/services/gateway/answer"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/fairness"
)

// LongRunning recognizes requests without a time limit.
var LongRunning = genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"),
	sets.NewString("attach", "exec", "proxy", "log", "portforward"))

// Labelled returns the RequestInfo from which metrics take their labels: without anything that a client chooses freely.
type Labelled func(*request.RequestInfo) *request.RequestInfo

// Parts are the parts of a gateway that its filters use.
type Parts struct {
	Authn   *access.Authenticator
	Authz   *access.Authorizer
	Auditor *audit.Auditor
	// Fairness is nil if requests are not bounded by flow.
	Fairness *fairness.Fairness
	// Buffered reports whether a request's body is read before the request counts as in flight.
	Buffered func(*http.Request) bool
	Labelled Labelled
}

// Chain wraps api in the filters, in kube-apiserver's order (k8s.io/apiserver/pkg/server/config.go,
// DefaultBuildHandlerChain).
func (s *Server) Chain(api http.Handler, p Parts) http.Handler {
	c := s.config
	auditor := p.Auditor
	h := step("authorization", api, func(h http.Handler) http.Handler {
		return genericapifilters.WithAuthorization(h, p.Authz, answer.Codecs)
	})
	h = unlimited(s.limited(h, p), h)
	bodies := new(body.Reader) // one, which bounds all
	h = step("body", h, func(h http.Handler) http.Handler { return bodies.ReadAhead(h, p.Buffered) })
	h = step("bounds", h, s.bounds.filter)
	if utilfeature.DefaultFeatureGate.Enabled(genericfeatures.ConstrainedImpersonation) {
		h = step("constrainedimpersonation", h, func(h http.Handler) http.Handler {
			return impersonation.WithConstrainedImpersonation(h, p.Authz, answer.Codecs)
		})
	} else {
		h = step("impersonation", h, func(h http.Handler) http.Handler {
			return impersonation.WithImpersonation(h, p.Authz, answer.Codecs)
		})
	}
	h = genericapifilters.WithAudit(h, auditor.Sink, auditor.Policy, LongRunning)
	h = traced(h)
	failed := genericapifilters.WithFailedAuthenticationAudit(unauthorized{}, auditor.Sink, auditor.Policy)
	h = genericapifilters.WithAuthentication(h, failClosed{p.Authn}, failed,
		authenticator.Audiences(c.APIAudiences), nil)
	h = genericfilters.WithCORS(h, c.CORS, nil, nil, nil, "true")
	h = genericapifilters.WithWarningRecorder(h)
	h = timely(h, p.Labelled)
	h = genericapifilters.WithRequestDeadline(h, auditor.Sink, auditor.Policy, LongRunning, answer.Codecs,
		c.RequestTimeout)
	h = genericfilters.WithWaitGroup(h, LongRunning, s.InFlight)
	if c.GoawayChance > 0 {
		h = genericfilters.WithProbabilisticGoaway(h, c.GoawayChance)
	}
	h = genericapifilters.WithCacheControl(h)
	h = genericfilters.WithHSTS(h, c.HSTS)
	h = genericfilters.WithHTTPLogging(h)
	h = genericapifilters.WithLatencyTrackers(h)
	h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
	h = genericapifilters.WithRequestReceivedTimestamp(h)
	h = recovered(h, p.Labelled)
	return genericapifilters.WithAuditInit(h)
}

// limited bounds the requests that next answers: by flow, or those in flight.
func (s *Server) limited(next http.Handler, p Parts) http.Handler {
	c := s.config
	longRunning := func(req *http.Request, info *request.RequestInfo) bool {
		return LongRunning(req, ownInfo(req.Context(), info))
	}
	return counted(next, p.Labelled, func(h http.Handler) http.Handler {
		if p.Fairness == nil {
			return genericfilters.WithMaxInFlightLimit(h, c.MaxInFlight, c.MaxMutating, longRunning)
		}
		return step("priorityandfairness", h, func(h http.Handler) http.Handler {
			return p.Fairness.Filter(h, longRunning, ownInfo, c.RequestTimeout)
		})
	})
}

// Inside is api for a client within the process, which may do what authz says. It is audited, and passes none of the
// filters that bound what clients do.
func Inside(api http.Handler, authz authorizer.Authorizer, auditor *audit.Auditor) http.Handler {
	h := genericapifilters.WithAuthorization(api, authz, answer.Codecs)
	h = genericapifilters.WithAudit(h, auditor.Sink, auditor.Policy, LongRunning)
	h = genericapifilters.WithWarningRecorder(h)
	h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
	h = genericapifilters.WithRequestReceivedTimestamp(h)
	return genericapifilters.WithAuditInit(h)
}

// recovered logs a panic and ends its request as aborted, as kube-apiserver does: a client must not take what it has of
// the answer for the whole. Upstream's filter panics again only while runtime.ReallyCrash is set, which it is not here
// (cmd/watershed). An abort after the client has left is neither logged nor counted.
func recovered(h http.Handler, labelled Labelled) http.Handler {
	filtered := genericfilters.WithPanicRecovery(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer func() {
			err := recover()
			if err == nil {
				return
			}
			answer.Abort(req.Context())
			if err != http.ErrAbortHandler || !left(req) { //nolint:errorlint // a panic's value, not an error
				panic(err)
			}
		}()
		h.ServeHTTP(w, req)
	}), infoOf(labelled))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx, aborted := answer.WithAbort(req.Context())
		filtered.ServeHTTP(w, req.WithContext(ctx))
		if aborted() {
			panic(http.ErrAbortHandler)
		}
	})
}

// infoOf resolves requests for upstream's filters that label metrics by what they are given.
type infoOf Labelled

// NewRequestInfo implements request.RequestInfoResolver.
func (labelled infoOf) NewRequestInfo(req *http.Request) (*request.RequestInfo, error) {
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		info = nil
	}
	return labelled(info), nil
}

// counted wraps next in filters that label metrics by the RequestInfo in the context: a request that they refuse leaves
// its resource, or its path, as a label for good. They get labelled's. Where a filter decides, it takes ownInfo. next
// gets the request's own.
func counted(next http.Handler, labelled Labelled, filters func(http.Handler) http.Handler) http.Handler {
	limited := filters(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if own := ownInfo(req.Context(), nil); own != nil {
			req = req.WithContext(request.WithRequestInfo(req.Context(), own))
		}
		next.ServeHTTP(w, req)
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if info, ok := request.RequestInfoFrom(req.Context()); ok {
			if shown := labelled(info); shown != info {
				ctx := context.WithValue(req.Context(), ownKey{}, info)
				req = req.WithContext(request.WithRequestInfo(ctx, shown))
			}
		}
		limited.ServeHTTP(w, req)
	})
}

// ownKey is the context's key of a request's own RequestInfo within filters that get another.
type ownKey struct{}

// ownInfo returns a request's own RequestInfo: info, unless counted has put another in its place.
func ownInfo(ctx context.Context, info *request.RequestInfo) *request.RequestInfo {
	if own, ok := ctx.Value(ownKey{}).(*request.RequestInfo); ok {
		return own
	}
	return info
}

// failClosed turns an authn that cannot be asked into an answer that a client retries, rather than a 401.
type failClosed struct{ *access.Authenticator }

var errUnavailable = errors.New("authentication is unavailable")

func (f failClosed) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	resp, ok, err := f.Authenticator.AuthenticateRequest(req)
	if err != nil && (apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err)) {
		*req = *req.WithContext(context.WithValue(req.Context(), unavailableKey{}, err))
		return nil, false, errUnavailable
	}
	return resp, ok, err
}

type unavailableKey struct{}

// unauthorized answers what nobody vouched for: 401, or 503 where nobody could be asked.
type unauthorized struct{}

func (unauthorized) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if err, ok := req.Context().Value(unavailableKey{}).(error); ok {
		w.Header().Set("Retry-After", "1")
		answer.Error(w, req, answer.V1, err)
		return
	}
	if c := access.Challenge(req.Context()); c != "" {
		w.Header().Set("WWW-Authenticate", c)
	}
	genericapifilters.Unauthorized(answer.Codecs).ServeHTTP(w, req)
}

// unlimited passes the system's own services by the limit of requests in flight and by flow control, as if they had an
// exempt level of their own: what everybody is decided by is not to wait for everybody.
func unlimited(limited, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if u, ok := request.UserFrom(req.Context()); ok && slices.Contains(u.GetGroups(), identity.ServicesGroup) {
			next.ServeHTTP(w, req)
			return
		}
		limited.ServeHTTP(w, req)
	})
}
