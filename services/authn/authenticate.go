package authn

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	apiserverserviceaccount "k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/warnings"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
)

// Authenticate implements authnv1.AuthnServer.
func (s *Service) Authenticate(ctx context.Context,
	r *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse, error) {
	req := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: r.Path}, Header: http.Header{}}).WithContext(ctx)
	for name, v := range r.Headers {
		req.Header[textproto.CanonicalMIMEHeaderKey(name)] = append([]string{}, v.Values...)
	}
	if len(r.PeerCertificates) > 0 {
		req.TLS = &tls.ConnectionState{}
		for _, der := range r.PeerCertificates {
			cert, err := x509.ParseCertificate(der)
			if err != nil {
				return &authnv1.AuthenticateResponse{Error: "x509: " + err.Error()}, nil
			}
			req.TLS.PeerCertificates = append(req.TLS.PeerCertificates, cert)
		}
	}
	before := req.Header.Clone()
	out, u, err := s.authenticate(req, nil)
	if err != nil || !out.Authenticated {
		return out, err
	}
	if !identity.IsAnonymous(u) {
		var certificates []*x509.Certificate
		if req.TLS != nil {
			certificates = req.TLS.PeerCertificates
		}
		out.CacheMilliseconds = s.cacheTTL(before, certificates).Milliseconds()
	}
	if len(r.PeerCertificates) > 0 {
		out.ConsultedHeaders = s.consultedHeaders
	}
	s.removeCredentials(req.Header)
	out.ReplacedHeaders = replacedHeaders(before, req.Header)
	return out, nil
}

// checkFresh returns UNAVAILABLE for a service account or bootstrap user if the cluster data is stale, because the
// token may have been revoked. Certificates, static tokens and other issuers' tokens do not depend on the cluster. The
// system's services use certificates.
func (s *Service) checkFresh(u user.Info) error {
	if !strings.HasPrefix(u.GetName(), apiserverserviceaccount.ServiceAccountUsernamePrefix) &&
		!strings.HasPrefix(u.GetName(), bootstrapapi.BootstrapUserPrefix) {
		return nil
	}
	if err := s.cluster.Err(); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// checkBootstrapSecrets returns UNAVAILABLE if a request has a bootstrap token and the informer of bootstrap tokens is
// unread or stale. The informer may then lack the token's Secret. Upstream's authenticator has no other source
// (k8s.io/kubernetes/plugin/pkg/auth/authenticator/token/bootstrap).
func (s *Service) checkBootstrapSecrets(h http.Header) error {
	if o := s.config.Options.BootstrapToken; o == nil || !o.Enable {
		return nil
	}
	err := s.cluster.Err()
	if _, known := s.cluster.Age(); !known {
		err = errors.New("the bootstrap tokens have not been read yet")
	}
	if err == nil || !slices.ContainsFunc(bearerTokens(h), isBootstrapToken) {
		return nil
	}
	return status.Error(codes.Unavailable, err.Error())
}

// ReviewToken implements authnv1.AuthnServer. An empty token authenticates no user; the response shows whether authn
// can look up tokens.
func (s *Service) ReviewToken(ctx context.Context,
	r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	if err := s.cluster.Err(); r.Token == "" && err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	req := (&http.Request{
		URL:    &url.URL{},
		Header: http.Header{"Authorization": {"Bearer " + r.Token}},
	}).WithContext(ctx)
	out, _, err := s.authenticate(req, r.Audiences)
	return out, err
}

// authenticate runs the authenticators for an audience; none is the API's own. An error means that no result is
// available.
func (s *Service) authenticate(
	req *http.Request,
	audiences []string,
) (*authnv1.AuthenticateResponse, user.Info, error) {
	if len(audiences) == 0 {
		audiences = s.audiences
	}
	if len(audiences) > 0 {
		req = req.WithContext(authenticator.WithAudiences(req.Context(), audiences))
	}
	ctx, warned := warnings.WithRecorder(audit.WithAuditContext(req.Context()))
	began := time.Now()
	unread := s.checkBootstrapSecrets(req.Header) // before the lookup, because an informer may be read meanwhile
	resp, ok, err := s.auth.AuthenticateRequest(req.WithContext(ctx))
	if !ok && errors.Is(err, errBusy) { // the password was not compared, so it is not wrong
		return nil, nil, status.Error(codes.Unavailable, errBusy.Error())
	}
	// The failed read may be of another request. Then this client retries without need.
	if !ok && err != nil && s.tokenObjects.failedSince(began) &&
		slices.ContainsFunc(bearerTokens(req.Header), s.readsObjects) {
		return nil, nil, status.Error(codes.Unavailable, "the object that a token is bound to cannot be read")
	}
	if !ok && unread != nil {
		return nil, nil, unread
	}
	out := &authnv1.AuthenticateResponse{Authenticated: ok, Warnings: warned.List()}
	out.AuditAnnotations = audit.AuditContextFrom(ctx).GetEventAnnotations()
	if err != nil {
		out.Error = err.Error()
	}
	if !ok {
		if s.config.BasicAuthFile != "" {
			out.Challenge = challenge
		}
		return out, nil, nil
	}
	if err := s.checkFresh(resp.User); err != nil {
		return nil, nil, err
	}
	out.User, out.Audiences = identity.UserProto(resp.User), resp.Audiences
	return out, resp.User, nil
}

// IssuerDocument implements authnv1.AuthnServer.
func (s *Service) IssuerDocument(_ context.Context,
	r *authnv1.IssuerDocumentRequest) (*authnv1.IssuerDocumentResponse, error) {
	if s.documents == nil {
		return nil, status.Error(codes.NotFound, "no service account issuer")
	}
	metadata, err := s.documents.metadataFor(r.ExternalAddress)
	if err != nil {
		return nil, status.Error(codes.NotFound, err.Error())
	}
	if r.Path == serviceaccount.OpenIDConfigPath {
		body, age := metadata.GetConfigJSON()
		return &authnv1.IssuerDocumentResponse{
			Body:          body,
			ContentType:   "application/json",
			MaxAgeSeconds: int64(age),
		}, nil
	}
	body, age := metadata.GetKeysetJSON()
	return &authnv1.IssuerDocumentResponse{
		Body:          body,
		ContentType:   "application/jwk-set+json",
		MaxAgeSeconds: int64(age),
	}, nil
}
