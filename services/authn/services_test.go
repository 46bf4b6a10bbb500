package authn

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"os"
	"testing"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/pki"
)

// The services' authority authenticates only authn, authz, admission and registry. Another authority authenticates none
// of them here.
func TestTheServicesHaveAnAuthorityOfTheirOwn(t *testing.T) {
	dir := t.TempDir()
	open := func(name string) *pki.CA {
		ca, err := pki.OpenCA(dir, name, name)
		if err != nil {
			t.Fatal(err)
		}
		return ca
	}
	inner, clients := open("inner"), open("clients")
	called := false
	next := authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
		called = true
		return &authenticator.Response{User: &user.DefaultInfo{Name: "somebody"}}, true, nil
	})
	s, err := newServiceAuthenticator(inner.CertFile(), next)
	if err != nil {
		t.Fatal(err)
	}
	services := []string{identity.ServicesGroup}
	for name, c := range map[string]struct {
		ca   *pki.CA
		leaf pki.Leaf
		want string
	}{
		"authz": {inner, pki.Leaf{
			CommonName:    identity.Authz,
			Organizations: services,
			Usage:         pki.Client,
		}, identity.Authz},
		"a service of the network": {inner, pki.Leaf{
			CommonName: "registry",
			Usage:      pki.Client,
		}, ""},
		"without the group": {inner, pki.Leaf{
			CommonName: identity.Authz,
			Usage:      pki.Client,
		}, ""},
		"an administrator": {inner, pki.Leaf{
			CommonName:    "admin",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}, ""},
		"another in the group": {inner, pki.Leaf{
			CommonName:    "admin",
			Organizations: services,
			Usage:         pki.Client,
		}, ""},
		"a server": {inner, pki.Leaf{
			CommonName:    identity.Authz,
			Organizations: services,
			Usage:         pki.Server,
			SANs:          []string{"x"},
		}, ""},
		"of another authority": {clients, pki.Leaf{
			CommonName:    identity.Authz,
			Organizations: services,
			Usage:         pki.Client,
		}, ""},
		"with more than the group": {inner, pki.Leaf{
			CommonName:    identity.Authn,
			Organizations: []string{"system:masters", services[0]},
			Usage:         pki.Client,
		}, identity.Authn},
	} {
		c.leaf.Name = "leaf"
		file, _, _, err := c.ca.Leaf(c.leaf)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(data)
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		called = false
		resp, ok, err := s.AuthenticateRequest(&http.Request{
			TLS: &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}},
		})
		if err != nil || !ok || called != (c.want == "") || c.want != "" && resp.User.GetName() != c.want {
			t.Errorf("%s: %v, %v, next called: %v", name, resp, err, called)
		}
		if c.want != "" && len(resp.User.GetGroups()) != 2 { // other groups of the certificate are ignored
			t.Errorf("%s: %q", name, resp.User.GetGroups())
		}
	}
	// Another authenticator, for example of the cluster's client CA, gives no client such a name.
	for _, u := range []*user.DefaultInfo{{Name: identity.Admission}, {Name: "jane", Groups: services}} {
		s.next = authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
			return &authenticator.Response{User: u}, true, nil
		})
		if resp, ok, err := s.AuthenticateRequest(&http.Request{}); ok || err == nil {
			t.Errorf("%v: %v, %v", u, resp, err)
		}
	}
	if _, err := newServiceAuthenticator(dir+"/none", next); err == nil {
		t.Error("a missing authority file is accepted")
	}
}
