package pki

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A description has the end of a certificate, and an error if another CA has signed it or the file is damaged.
func TestDescribe(t *testing.T) {
	dir := t.TempDir()
	ca, err := OpenCA(dir, "ca", "ca")
	if err != nil {
		t.Fatal(err)
	}
	other, err := OpenCA(dir, "other", "ca")
	if err != nil {
		t.Fatal(err)
	}
	cert, key, _, err := ca.Leaf(Leaf{Name: "leaf", CommonName: "authn", Usage: Server})
	if err != nil {
		t.Fatal(err)
	}
	d := DescribeSigned("--rpc-cert-file", cert, ca.CertFile())
	if len(d) != 1 || d[0].Error != "" || d[0].Subject != "CN=authn" || !d[0].NotAfter.After(time.Now()) {
		t.Errorf("%+v", d)
	}
	d = DescribeSigned("--rpc-cert-file", cert, other.CertFile())
	if !strings.Contains(d[0].Error, "has not signed it") {
		t.Errorf("another CA: %+v", d)
	}
	if d = Describe("--client-ca-file", ca.CertFile()); len(d) != 1 || d[0].Flag != "--client-ca-file" {
		t.Errorf("%+v", d)
	}
	if d = Describe("--x", key); d != nil {
		t.Errorf("a key: %+v", d)
	}
	damaged := filepath.Join(dir, "damaged.crt")
	text, _ := os.ReadFile(cert)
	if err := os.WriteFile(damaged, []byte(strings.Replace(string(text), "MII", "MIX", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{damaged, filepath.Join(dir, "absent")} {
		if d = Describe("--x", file); len(d) != 1 || d[0].Error == "" {
			t.Errorf("%s: %+v", file, d)
		}
	}
}
