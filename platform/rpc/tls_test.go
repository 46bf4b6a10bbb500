package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"watershed.dev/platform/pki"
)

// newCA creates a CA of the inner network in its own directory.
func newCA(t *testing.T) *pki.CA {
	t.Helper()
	ca, err := pki.OpenCA(t.TempDir(), "inner-ca", "inner")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// identityOf creates a certificate of a CA in the same directory.
func identityOf(t *testing.T, ca *pki.CA, name string, usage pki.Usage) TLS {
	t.Helper()
	crt, key, _, err := ca.Leaf(pki.Leaf{Name: name, CommonName: name, SANs: []string{name}, Usage: usage})
	if err != nil {
		t.Fatal(err)
	}
	return TLS{CertFile: crt, KeyFile: key, CAFile: ca.CertFile()}
}

// shake runs a handshake and returns the errors of both sides.
func shake(server, client *tls.Config) error {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		s := tls.Server(a, server)
		err := s.HandshakeContext(ctx)
		if err == nil {
			_, err = s.Write([]byte("x"))
		}
		a.Close()
		done <- err
	}()
	c := tls.Client(b, client)
	err := c.HandshakeContext(ctx)
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1)) // in TLS 1.3 this read reports a rejected client certificate
	}
	b.Close()
	return errors.Join(err, <-done)
}

func TestTheInnerNetworkKnowsNamesUsesAndAuthorities(t *testing.T) {
	ca := newCA(t)
	other := newCA(t)
	registry := identityOf(t, ca, "registry", pki.Server|pki.Client)
	gateway := identityOf(t, ca, "gateway", pki.Client)
	authz := identityOf(t, ca, "authz", pki.Server)
	stranger := identityOf(t, other, "gateway", pki.Client)
	try := func(server, client TLS, name string) error {
		t.Helper()
		s, err := server.ServerConfig()
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.ClientConfig(name)
		if err != nil {
			t.Fatal(err)
		}
		return shake(s, c)
	}
	if err := try(registry, gateway, "registry"); err != nil {
		t.Errorf("gateway to registry: %v", err)
	}
	for desc, err := range map[string]error{
		"another service passes for registry":       try(authz, gateway, "registry"),
		"a client passes for a server":              try(gateway, gateway, "gateway"),
		"a server passes for a client":              try(registry, authz, "registry"),
		"a client of another authority is accepted": try(registry, stranger, "registry"),
		"a server of another authority is accepted": try(identityOf(t, other, "registry", pki.Server),
			gateway, "registry"),
	} {
		if err == nil {
			t.Error(desc)
		}
	}
}

// The next connection uses CAs and certificates that were replaced on disk, without a restart.
func TestAuthoritiesAreReadAgain(t *testing.T) {
	ca := newCA(t)
	id := identityOf(t, ca, "registry", pki.Server|pki.Client)
	server, err := id.ServerConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := id.ClientConfig("registry")
	if err != nil {
		t.Fatal(err)
	}
	if err := shake(server, client); err != nil {
		t.Fatal(err)
	}
	newer := newCA(t)
	replaced := identityOf(t, newer, "registry", pki.Server|pki.Client)
	previous, err := os.ReadFile(id.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	move := func(from, to string) {
		t.Helper()
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, data, 0o600)
		}
		if err == nil {
			at := time.Now().Add(time.Minute)
			err = os.Chtimes(to, at, at)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	bundle := filepath.Join(t.TempDir(), "bundle")
	now, err := os.ReadFile(replaced.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bundle, append(previous, now...), 0o600); err != nil {
		t.Fatal(err)
	}
	move(bundle, id.CAFile) // first both are trusted
	if err := shake(server, client); err != nil {
		t.Errorf("with both authorities: %v", err)
	}
	move(replaced.KeyFile, id.KeyFile)
	move(replaced.CertFile, id.CertFile)
	if err := shake(server, client); err != nil {
		t.Errorf("with a certificate of the new one: %v", err)
	}
	at := time.Now().Add(2 * time.Minute)
	if err := errors.Join(os.WriteFile(id.CAFile, previous, 0o600), os.Chtimes(id.CAFile, at, at)); err != nil {
		t.Fatal(err)
	}
	if err := shake(server, client); err == nil {
		t.Error("a removed authority is trusted")
	}
}
