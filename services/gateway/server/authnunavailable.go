package server

import (
	"context"
	"errors"
	"net/http"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"

	"watershed.dev/platform/rpc"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/responsewriters"
)

// authnUnavailable turns an unavailable authn into a response that a client retries, instead of 401.
type authnUnavailable struct{ *delegatedauth.Authenticator }

var errAuthnUnavailable = errors.New("authentication is unavailable")

func (a authnUnavailable) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	resp, ok, err := a.Authenticator.AuthenticateRequest(req)
	if rpc.IsUndecided(err) {
		*req = *req.WithContext(context.WithValue(req.Context(), authnUnavailableKey{}, err))
		return nil, false, errAuthnUnavailable
	}
	return resp, ok, err
}

type authnUnavailableKey struct{}

// unauthorized responds to requests without a valid credential: 401, or 503 if authn is unavailable.
type unauthorized struct{}

func (unauthorized) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if err, ok := req.Context().Value(authnUnavailableKey{}).(error); ok {
		respondUndecided(w, req, err)
		return
	}
	if c := delegatedauth.Challenge(req.Context()); c != "" {
		w.Header().Set("WWW-Authenticate", c)
	}
	genericapifilters.Unauthorized(responsewriters.Codecs).ServeHTTP(w, req)
}
