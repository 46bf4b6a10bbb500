package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	cliflag "k8s.io/component-base/cli/flag"

	"watershed.dev/platform/identity"
)

// TLSConfig holds the TLS settings of the server. kube-apiserver's controllers reload certificates and CAs when their
// files change.
type TLSConfig struct {
	CertFile, KeyFile string
	// SNI holds certificates for specific names.
	SNI []cliflag.NamedCertKey
	// ServicesCertFile and ServicesKeyFile are the certificate for connections of authn, authz, admission and registry,
	// which request identity.Gateway. Empty: the default certificate.
	ServicesCertFile, ServicesKeyFile string

	MinVersion   string
	CipherSuites []string
	Curves       []int32
	DisableHTTP2 bool
}

func (c *TLSConfig) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.CertFile, "tls-cert-file", "", "File containing the default x509 certificate for HTTPS.")
	fs.StringVar(&c.KeyFile, "tls-private-key-file", "",
		"File containing the default x509 private key matching --tls-cert-file.")
	fs.Var(cliflag.NewNamedCertKeyArray(&c.SNI), "tls-sni-cert-key",
		"A pair of x509 certificate and private key file paths, optionally suffixed with a list of domain patterns: "+
			"cert.pem,key.pem:*.example.com. The flag may be repeated.")
	fs.StringVar(&c.ServicesCertFile, "services-tls-cert-file", "",
		"File containing the x509 certificate for connections of authn, authz, admission and registry, which request the "+
			"server name gateway. Empty: --tls-cert-file.")
	fs.StringVar(&c.ServicesKeyFile, "services-tls-private-key-file", "",
		"File containing the x509 private key matching --services-tls-cert-file.")
	fs.StringVar(&c.MinVersion, "tls-min-version", "",
		"Minimum TLS version supported: VersionTLS12 (the default) or VersionTLS13.")
	fs.StringSliceVar(&c.CipherSuites, "tls-cipher-suites", nil,
		"Comma-separated list of cipher suites for TLS 1.2. Empty: Go's defaults.")
	fs.Int32SliceVar(&c.Curves, "tls-curve-preferences", nil,
		"Comma-separated list of numeric Go crypto/tls CurveID values: the allowed key exchange mechanisms. Go's order "+
			"applies. Empty: Go's defaults.")
	fs.BoolVar(&c.DisableHTTP2, "disable-http2-serving", false, "If true, HTTP/2 serving is disabled.")
}

// CheckServicesCertificate returns an error if the certificate for connections of authn, authz, admission and registry
// is unreadable, or not valid at a time. Without such a certificate it returns nil.
func (c *TLSConfig) CheckServicesCertificate(now time.Time) error {
	if c.ServicesCertFile == "" {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(c.ServicesCertFile, c.ServicesKeyFile)
	switch {
	case err != nil:
		return fmt.Errorf("--services-tls-cert-file %q: %w", c.ServicesCertFile, err)
	case now.Before(pair.Leaf.NotBefore) || now.After(pair.Leaf.NotAfter):
		return fmt.Errorf("--services-tls-cert-file %q: valid from %v to %v only", c.ServicesCertFile,
			pair.Leaf.NotBefore, pair.Leaf.NotAfter)
	}
	return nil
}

// clientCA is a CA file that the handshake advertises, and its flag. authn verifies the certificates.
type clientCA struct {
	flag, file string
	// services is true for the CA of authn, authz, admission and registry. Only their connections learn of it.
	services bool
}

// config returns the server's TLS configuration, which reloads its files until ctx is done.
func (c *TLSConfig) config(ctx context.Context, clientCAs ...clientCA) (*tls.Config, error) {
	if c.CertFile == "" || c.KeyFile == "" {
		return nil, errors.New("--tls-cert-file and --tls-private-key-file are required")
	}
	base, err := c.base()
	if err != nil {
		return nil, err
	}
	serving, err := dynamiccertificates.NewDynamicServingContentFromFiles("serving-cert", c.CertFile, c.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert-file %q with --tls-private-key-file %q: %w", c.CertFile, c.KeyFile, err)
	}
	providers := []reloader{serving}
	var sni []dynamiccertificates.SNICertKeyContentProvider
	for _, n := range c.SNI {
		p, err := dynamiccertificates.NewDynamicSNIContentFromFiles("sni-serving-cert",
			n.CertFile, n.KeyFile, n.Names...)
		if err != nil {
			return nil, fmt.Errorf("--tls-sni-cert-key %q: %w", n.String(), err)
		}
		sni, providers = append(sni, p), append(providers, p)
	}
	if c.ServicesCertFile != "" {
		p, err := dynamiccertificates.NewDynamicSNIContentFromFiles("services-serving-cert",
			c.ServicesCertFile, c.ServicesKeyFile, identity.Gateway)
		if err != nil {
			return nil, fmt.Errorf("--services-tls-cert-file %q: %w", c.ServicesCertFile, err)
		}
		sni, providers = append(sni, p), append(providers, p)
	}
	var clients, all []dynamiccertificates.CAContentProvider
	for _, f := range clientCAs {
		if f.file == "" {
			continue
		}
		p, err := dynamiccertificates.NewDynamicCAContentFromFile(f.flag, f.file)
		if err != nil {
			return nil, fmt.Errorf("--%s %q: %w", f.flag, f.file, err)
		}
		if !f.services {
			clients = append(clients, p)
		}
		all, providers = append(all, p), append(providers, p)
	}
	forClients, err := newHandshake(ctx, base, clients, serving, sni, providers)
	if err != nil {
		return nil, err
	}
	forServices, err := newHandshake(ctx, base, all, serving, sni, providers)
	if err != nil {
		return nil, err
	}
	for _, p := range providers { // they have their listeners, which a running provider must not get
		if err := p.RunOnce(ctx); err != nil {
			return nil, err
		}
		go p.Run(ctx, 1)
	}
	conf := base.Clone() // the controllers read base
	conf.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if hello.ServerName == identity.Gateway {
			return forServices(hello)
		}
		return forClients(hello)
	}
	return conf, nil
}

// newHandshake returns a GetConfigForClient that advertises the authorities. Changes of the providers, which do not run
// yet, take effect until ctx is done.
func newHandshake(ctx context.Context, base *tls.Config, authorities []dynamiccertificates.CAContentProvider,
	serving dynamiccertificates.CertKeyContentProvider, sni []dynamiccertificates.SNICertKeyContentProvider,
	providers []reloader) (func(*tls.ClientHelloInfo) (*tls.Config, error), error) {
	var clients dynamiccertificates.CAContentProvider
	if len(authorities) > 0 {
		clients = dynamiccertificates.NewUnionCAContentProvider(authorities...)
	}
	controller := dynamiccertificates.NewDynamicServingCertificateController(base, clients, serving, sni, nil)
	for _, p := range providers {
		p.AddListener(controller)
	}
	if err := controller.RunOnce(); err != nil {
		return nil, err
	}
	go controller.Run(1, ctx.Done())
	return controller.GetConfigForClient, nil
}

// base returns the settings that do not change while the server runs.
func (c *TLSConfig) base() (*tls.Config, error) {
	minimum, err := cliflag.TLSVersion(c.MinVersion)
	if err != nil {
		return nil, fmt.Errorf("--tls-min-version %q: %w", c.MinVersion, err)
	}
	suites, err := cliflag.TLSCipherSuites(c.CipherSuites)
	if err != nil {
		return nil, fmt.Errorf("--tls-cipher-suites: %w", err)
	}
	curves, err := cliflag.TLSCurvePreferences(c.Curves)
	if err != nil {
		return nil, fmt.Errorf("--tls-curve-preferences: %w", err)
	}
	protocols := []string{"h2", "http/1.1"}
	if c.DisableHTTP2 {
		protocols = protocols[1:]
	}
	return &tls.Config{
		MinVersion:                  minimum,
		CipherSuites:                suites,
		CurvePreferences:            curves,
		DynamicRecordSizingDisabled: true,
		ClientAuth:                  tls.RequestClientCert,
		NextProtos:                  protocols,
	}, nil
}

// reloader reloads files when they change.
type reloader interface {
	dynamiccertificates.Notifier
	dynamiccertificates.ControllerRunner
}
