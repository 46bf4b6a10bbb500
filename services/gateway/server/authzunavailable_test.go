package server

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
)

// answer is an authorizer with the same answer to all requests.
type answer struct {
	decision authorizer.Decision
	err      error
}

func (a answer) Authorize(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
	return a.decision, "", a.err
}

// A client retries if authz is unavailable: authorization does not respond 500, and impersonation does not respond 403.
// The next handler has the request's own ResponseWriter.
func TestAnUnavailableAuthzIsNoDecision(t *testing.T) {
	unavailable := apierrors.NewServiceUnavailable("the policy may be stale")
	for name, filter := range map[string]func(http.Handler, authorizer.Authorizer) http.Handler{
		"authorization":               authorization,
		"constrained impersonation":   constrainedImpersonation,
		"unconstrained impersonation": unconstrainedImpersonation,
	} {
		for _, x := range []struct {
			decision authorizer.Decision
			err      error
			code     int
		}{
			{authorizer.DecisionAllow, nil, http.StatusTeapot},
			{authorizer.DecisionNoOpinion, nil, http.StatusForbidden},
			{authorizer.DecisionDeny, unavailable, http.StatusServiceUnavailable},
			{authorizer.DecisionDeny, apierrors.NewTimeoutError("slow", 1), http.StatusGatewayTimeout},
			{authorizer.DecisionNoOpinion, errors.New("a broken webhook"), map[bool]int{
				true: http.StatusInternalServerError, false: http.StatusForbidden}[name == "authorization"]},
		} {
			w := httptest.NewRecorder()
			var own http.ResponseWriter
			h := withAuthz(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				own = w
				w.WriteHeader(http.StatusTeapot)
			}), answer{x.decision, x.err}, filter)
			h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
			h = genericapifilters.WithAuditInit(h)
			req := httptest.NewRequestWithContext(request.WithUser(t.Context(), &user.DefaultInfo{Name: "jane"}),
				http.MethodGet, "/api/v1/namespaces/x/pods", nil)
			if name != "authorization" {
				req.Header.Set("Impersonate-User", "bob")
			}
			h.ServeHTTP(w, req)
			retried := w.Header().Get("Retry-After") != ""
			undecided := x.code == http.StatusServiceUnavailable || x.code == http.StatusGatewayTimeout
			if w.Code != x.code || retried != undecided {
				t.Errorf("%s, %v: %d %v %s", name, x.err, w.Code, w.Header(), w.Body)
			}
			if retried && (!strings.HasPrefix(w.Body.String(), `{"kind":"Status"`) ||
				w.Header().Get("Content-Type") != "application/json") {
				t.Errorf("%s, %v: %v %s", name, x.err, w.Header(), w.Body)
			}
			if x.code == http.StatusTeapot && own != http.ResponseWriter(w) {
				t.Errorf("%s: the next handler has a %T", name, own)
			}
		}
	}
}
