package authn

import (
	"crypto/x509"
	"fmt"
	"net/http"
	"slices"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"watershed.dev/platform/identity"
)

// serviceAuthenticator authenticates authn, authz, admission and registry by a certificate authority of their own. They
// call the cluster whatever its PKI is, because a client CA that a cluster brings has not issued their certificates.
// The authority authenticates no other client.
type serviceAuthenticator struct {
	authority *dynamiccertificates.DynamicFileCAContent
	// next is all other authenticators.
	next authenticator.Request
}

// newServiceAuthenticator reads the authority's file now and after each change.
func newServiceAuthenticator(file string, next authenticator.Request) (*serviceAuthenticator, error) {
	authority, err := dynamiccertificates.NewDynamicCAContentFromFile("services-client-ca-file", file)
	if err != nil {
		return nil, fmt.Errorf("--services-client-ca-file %q: %w", file, err)
	}
	return &serviceAuthenticator{authority, next}, nil
}

// AuthenticateRequest implements authenticator.Request.
func (s *serviceAuthenticator) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	if req.TLS != nil && len(req.TLS.PeerCertificates) > 0 {
		if u := s.serviceUser(req.TLS.PeerCertificates); u != nil {
			return &authenticator.Response{User: u}, true, nil
		}
	}
	resp, ok, err := s.next.AuthenticateRequest(req)
	if ok && identity.IsReserved(resp.User) {
		return nil, false, fmt.Errorf("%q is an identity of the system's services, which need a certificate of "+
			"--services-client-ca-file", resp.User.GetName())
	}
	return resp, ok, err
}

// serviceUser returns the service that a certificate chain belongs to, or nil.
func (s *serviceAuthenticator) serviceUser(chain []*x509.Certificate) user.Info {
	name := chain[0].Subject.CommonName
	if !slices.Contains([]string{identity.Authn, identity.Authz, identity.Admission, identity.Registry}, name) ||
		!slices.Contains(chain[0].Subject.Organization, identity.ServicesGroup) {
		return nil
	}
	opts, ok := s.authority.VerifyOptions()
	if !ok {
		return nil
	}
	opts.Intermediates = x509.NewCertPool()
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	opts.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if _, err := chain[0].Verify(opts); err != nil {
		return nil
	}
	return &user.DefaultInfo{Name: name, Groups: []string{identity.ServicesGroup, user.AllAuthenticated}}
}
