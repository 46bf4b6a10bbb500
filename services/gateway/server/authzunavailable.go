package server

import (
	"context"
	"net/http"

	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/rpc"
	"watershed.dev/services/gateway/responsewriters"
)

// withAuthz puts a filter of upstream that authorizes requests before next. Such filters respond 500 or 403 if the
// authorizer fails, which clients take for a final decision. If authz is unavailable or too slow, the response is 503
// or 504 with Retry-After.
func withAuthz(
	next http.Handler,
	authz authorizer.Authorizer,
	filter func(http.Handler, authorizer.Authorizer) http.Handler,
) http.Handler {
	filtered := filter(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u := w.(*authzWriter)
		u.passed = true
		next.ServeHTTP(u.ResponseWriter, req)
	}), authzUnavailable{authz})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u := &authzWriter{ResponseWriter: w}
		filtered.ServeHTTP(u, req.WithContext(context.WithValue(req.Context(), authzWriterKey{}, u)))
		if u.unavailable != nil && !u.passed {
			respondUndecided(w, req, u.unavailable)
		}
	})
}

// respondUndecided responds with the error of a service that has not decided, and makes clients retry after 1 s.
func respondUndecided(w http.ResponseWriter, req *http.Request, err error) {
	w.Header().Set("Retry-After", "1")
	responsewriters.Error(w, req, responsewriters.V1, err)
}

// authzWriter is the ResponseWriter of a filter that authorizes. It discards the filter's response if authz was
// unavailable.
type authzWriter struct {
	http.ResponseWriter
	unavailable error
	// passed is true if the filter has called the next handler, which has the ResponseWriter of the request.
	passed bool
}

type authzWriterKey struct{}

// Header implements http.ResponseWriter.
func (u *authzWriter) Header() http.Header {
	if u.unavailable == nil {
		return u.ResponseWriter.Header()
	}
	return http.Header{}
}

// WriteHeader implements http.ResponseWriter.
func (u *authzWriter) WriteHeader(code int) {
	if u.unavailable == nil {
		u.ResponseWriter.WriteHeader(code)
	}
}

// Write implements http.ResponseWriter.
func (u *authzWriter) Write(p []byte) (int, error) {
	if u.unavailable == nil {
		return u.ResponseWriter.Write(p)
	}
	return len(p), nil
}

// authzUnavailable records in the request's authzWriter that authz was unavailable.
type authzUnavailable struct{ authorizer.Authorizer }

// Authorize implements authorizer.Authorizer.
func (a authzUnavailable) Authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string,
	error) {
	d, reason, err := a.Authorizer.Authorize(ctx, attrs)
	if u, ok := ctx.Value(authzWriterKey{}).(*authzWriter); ok && rpc.IsUndecided(err) {
		u.unavailable = err
	}
	return d, reason, err
}
