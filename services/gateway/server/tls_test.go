package server

import (
	"context"
	"crypto/tls"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	cliflag "k8s.io/component-base/cli/flag"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/pki"
)

func authority(t *testing.T, dir, name string) *pki.CA {
	t.Helper()
	ca, err := pki.OpenCA(dir, name, name)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func leaf(t *testing.T, ca *pki.CA, name string, sans ...string) (crt, key string) {
	t.Helper()
	crt, key, _, err := ca.Leaf(pki.Leaf{Name: name, CommonName: name, SANs: sans, Usage: pki.Server})
	if err != nil {
		t.Fatal(err)
	}
	return crt, key
}

// handshake holds the server's certificate for a name and the CAs that it advertises for client certificates.
type handshake struct {
	serving   string
	clientCAs []string
}

func dial(t *testing.T, conf *tls.Config, name string, most uint16) (s handshake, err error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", conf)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			_ = c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{
		ServerName:         name,
		InsecureSkipVerify: true,
		MinVersion:         tls.VersionTLS10,
		MaxVersion:         most,
		GetClientCertificate: func(r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
			for _, a := range r.AcceptableCAs {
				s.clientCAs = append(s.clientCAs, string(a))
			}
			return &tls.Certificate{}, nil
		},
	})
	if err != nil {
		return s, err
	}
	defer c.Close()
	s.serving = c.ConnectionState().PeerCertificates[0].Subject.CommonName
	return s, nil
}

// Certificates and advertised CAs are reloaded when their files change, and each name gets its own certificate (S29).
func TestTLSReloadsItsFiles(t *testing.T) {
	dir := t.TempDir()
	ca, clients, others := authority(t, dir, "ca"), authority(t, dir, "clients"), authority(t, dir, "others")
	c := &TLSConfig{MinVersion: "VersionTLS13"}
	c.CertFile, c.KeyFile = leaf(t, ca, "first", "localhost")
	sniCert, sniKey := leaf(t, ca, "single", "api.example.com")
	c.SNI = []cliflag.NamedCertKey{{Names: []string{"api.example.com"}, CertFile: sniCert, KeyFile: sniKey}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conf, err := c.config(ctx, clientCA{flag: "client-ca-file", file: clients.CertFile()})
	if err != nil {
		t.Fatal(err)
	}
	s, err := dial(t, conf, "localhost", 0)
	if err != nil || s.serving != "first" || len(s.clientCAs) != 1 || !strings.Contains(s.clientCAs[0], "clients") {
		t.Errorf("%q, %v", s, err)
	}
	if s, err := dial(t, conf, "api.example.com", 0); err != nil || s.serving != "single" {
		t.Errorf("%q, %v", s, err)
	}
	if _, err := dial(t, conf, "localhost", tls.VersionTLS12); err == nil {
		t.Error("TLS 1.2 is accepted below --tls-min-version")
	}
	move := func(to, from string) {
		t.Helper()
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	crt, key := leaf(t, ca, "second", "localhost")
	move(c.KeyFile, key)
	move(c.CertFile, crt)
	move(clients.CertFile(), others.CertFile())
	for until := time.Now().Add(40 * time.Second); ; time.Sleep(20 * time.Millisecond) { // less than a refresh
		s, err := dial(t, conf, "localhost", 0)
		if err == nil && s.serving == "second" && len(s.clientCAs) == 1 && strings.Contains(s.clientCAs[0], "others") {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("%q, %v", s, errors.Join(err))
		}
	}
}

// Only connections of authn, authz and admission learn of the CA of their certificates.
func TestTheServicesCAIsAdvertisedToServices(t *testing.T) {
	dir := t.TempDir()
	clients, services := authority(t, dir, "clients"), authority(t, dir, "services")
	c := &TLSConfig{}
	c.CertFile, c.KeyFile = leaf(t, clients, "serving", "localhost")
	c.ServicesCertFile, c.ServicesKeyFile = leaf(t, services, "inner", identity.Gateway)
	conf, err := c.config(t.Context(), clientCA{flag: "client-ca-file", file: clients.CertFile()},
		clientCA{flag: "services-client-ca-file", file: services.CertFile(), services: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]struct {
		serving     string
		authorities int
	}{"localhost": {"serving", 1}, "": {"serving", 1}, identity.Gateway: {"inner", 2}} {
		s, err := dial(t, conf, name, 0)
		if err != nil || s.serving != want.serving || len(s.clientCAs) != want.authorities {
			t.Errorf("%q: %q, %v", name, s, err)
		}
	}
}

func TestBadTLSSettingsNameTheirFlag(t *testing.T) {
	dir := t.TempDir()
	crt, key := leaf(t, authority(t, dir, "ca"), "x", "localhost")
	for flag, c := range map[string]TLSConfig{
		"--tls-cert-file":         {CertFile: crt, KeyFile: dir + "/none"},
		"--tls-curve-preferences": {CertFile: crt, KeyFile: key, Curves: []int32{1}},
		"--tls-min-version":       {CertFile: crt, KeyFile: key, MinVersion: "1.2"},
		"--tls-cipher-suites":     {CertFile: crt, KeyFile: key, CipherSuites: []string{"ROT13"}},
		"--tls-sni-cert-key": {
			CertFile: crt,
			KeyFile:  key,
			SNI:      []cliflag.NamedCertKey{{CertFile: dir + "/none", KeyFile: key}},
		},
	} {
		if _, err := c.config(t.Context()); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
	c := TLSConfig{CertFile: crt, KeyFile: key}
	if _, err := c.config(t.Context(), clientCA{flag: "client-ca-file", file: dir + "/none"}); err == nil ||
		!strings.Contains(err.Error(), "--client-ca-file") {
		t.Errorf("%v", err)
	}
}

// A server without --tls-min-version accepts TLS 1.2 and nothing older.
func TestTLS11IsRefused(t *testing.T) {
	c := &TLSConfig{}
	c.CertFile, c.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "x", "localhost")
	conf, err := c.config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial(t, conf, "localhost", tls.VersionTLS12); err != nil {
		t.Errorf("TLS 1.2: %v", err)
	}
	if _, err := dial(t, conf, "localhost", tls.VersionTLS11); err == nil ||
		!strings.Contains(err.Error(), "protocol version") {
		t.Errorf("TLS 1.1: %v", err)
	}
}

// --tls-curve-preferences limits the key exchange.
func TestCurvesAreLimited(t *testing.T) {
	c := &TLSConfig{Curves: []int32{int32(tls.CurveP384)}}
	c.CertFile, c.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "x", "localhost")
	conf, err := c.config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", conf)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake()
			conn.Close()
		}
	}()
	for curve, allowed := range map[tls.CurveID]bool{tls.CurveP384: true, tls.X25519: false} {
		client := &tls.Config{InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{curve}}
		conn, err := tls.Dial("tcp", l.Addr().String(), client)
		if err == nil {
			conn.Close()
		}
		if (err == nil) != allowed {
			t.Errorf("%v: %v", curve, err)
		}
	}
}

// The check of the certificate for services fails if it is unreadable or not valid now.
func TestTheServicesCertificateIsChecked(t *testing.T) {
	c := &TLSConfig{}
	if err := c.CheckServicesCertificate(time.Now()); err != nil {
		t.Errorf("without a certificate: %v", err)
	}
	c.ServicesCertFile, c.ServicesKeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "gateway", "gateway")
	const decade = 10 * 365 * 24 * time.Hour
	for after, valid := range map[time.Duration]bool{0: true, -decade: false, decade: false} {
		if err := c.CheckServicesCertificate(time.Now().Add(after)); (err == nil) != valid {
			t.Errorf("%v from now: %v", after, err)
		}
	}
	c.ServicesKeyFile = "missing"
	if err := c.CheckServicesCertificate(time.Now()); err == nil {
		t.Error("a missing key is accepted")
	}
}
