package pki

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"testing"
)

func TestALeafIsItsCAs(t *testing.T) {
	dir := t.TempDir()
	ca, err := OpenCA(dir, "ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	crt, key, err := ca.Leaf("serving", "server", []string{"group"}, []string{"localhost", "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	pem, _ := os.ReadFile(ca.CertFile())
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	for _, host := range []string{"localhost", "127.0.0.1"} {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: host}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	// What exists is kept; a name that it lacks makes a new one.
	again, err := OpenCA(dir, "ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(crt)
	if _, _, err := again.Leaf("serving", "server", nil, []string{"localhost"}); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(crt); string(after) != string(before) {
		t.Error("a certificate that covers the names was made anew")
	}
	if _, _, err := again.Leaf("serving", "server", nil, []string{"other.example"}); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(crt); string(after) == string(before) {
		t.Error("a certificate that lacks a name was kept")
	}
}
