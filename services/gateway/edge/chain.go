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

// Chain wraps api in the filters, in kube-apiserver's order (k8s.io/apiserver/pkg/server/config.go,
// DefaultBuildHandlerChain). buffered says of which requests the body is read before they count as in flight: those
// that the gateway answers itself. fair is nil where requests are not bounded by flow.
func (s *Server) Chain(api http.Handler, authn *access.Authenticator, authz *access.Authorizer, auditor *audit.Auditor,
	fair *fairness.Fairness, buffered func(*http.Request) bool) http.Handler {
	c := s.config
	h := step("authorization", api, func(h http.Handler) http.Handler {
		return genericapifilters.WithAuthorization(h, authz, answer.Codecs)
	})
	if fair != nil {
		h = unlimited(step("priorityandfairness", h, func(h http.Handler) http.Handler {
			return fair.Filter(h, LongRunning, c.RequestTimeout)
		}), h)
	} else {
		h = unlimited(genericfilters.WithMaxInFlightLimit(h, c.MaxInFlight, c.MaxMutating, LongRunning), h)
	}
	bodies := new(body.Reader) // one, which bounds all
	h = step("body", h, func(h http.Handler) http.Handler { return bodies.ReadAhead(h, buffered) })
	h = step("bounds", h, s.bounds.filter)
	if utilfeature.DefaultFeatureGate.Enabled(genericfeatures.ConstrainedImpersonation) {
		h = step("constrainedimpersonation", h, func(h http.Handler) http.Handler {
			return impersonation.WithConstrainedImpersonation(h, authz, answer.Codecs)
		})
	} else {
		h = step("impersonation", h, func(h http.Handler) http.Handler {
			return impersonation.WithImpersonation(h, authz, answer.Codecs)
		})
	}
	h = genericapifilters.WithAudit(h, auditor.Sink, auditor.Policy, LongRunning)
	h = traced(h)
	failed := genericapifilters.WithFailedAuthenticationAudit(unauthorized{}, auditor.Sink, auditor.Policy)
	h = genericapifilters.WithAuthentication(h, failClosed{authn}, failed,
		authenticator.Audiences(c.APIAudiences), nil)
	h = genericfilters.WithCORS(h, c.CORS, nil, nil, nil, "true")
	h = genericapifilters.WithWarningRecorder(h)
	h = timely(h)
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
	h = recovered(h)
	return genericapifilters.WithAuditInit(h)
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
// (cmd/watershed).
func recovered(h http.Handler) http.Handler {
	filtered := genericfilters.WithPanicRecovery(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		whole := false
		defer func() {
			if !whole {
				answer.Abort(req.Context())
			}
		}()
		h.ServeHTTP(w, req)
		whole = true
	}), paths.RequestInfo)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx, aborted := answer.WithAbort(req.Context())
		filtered.ServeHTTP(w, req.WithContext(ctx))
		if aborted() {
			panic(http.ErrAbortHandler)
		}
	})
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
