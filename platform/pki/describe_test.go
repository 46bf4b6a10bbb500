package pki

import (
	"crypto/x509"
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

// A verification is at the present time, or at the nearest time at which the certificate is valid.
func TestTimeWithinACertificate(t *testing.T) {
	now := time.Now()
	at := func(hours int) time.Time { return now.Add(time.Duration(hours) * time.Hour) }
	for name, c := range map[string]struct{ from, until, want time.Time }{
		"valid":   {at(-1), at(1), now},
		"ended":   {at(-3), at(-1), at(-1)},
		"not yet": {at(1), at(3), at(1)},
	} {
		got := TimeWithin(&x509.Certificate{NotBefore: c.from, NotAfter: c.until})
		if d := got.Sub(c.want).Abs(); d > time.Minute || got.Before(c.from) || got.After(c.until) {
			t.Errorf("%s: got %v, want about %v", name, got, c.want)
		}
	}
}

// The errors name the flag of the file.
func TestReadCertPool(t *testing.T) {
	dir := t.TempDir()
	ca, err := OpenCA(dir, "ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	if pool, err := ReadCertPool("x-ca-file", ca.CertFile()); err != nil || pool.Equal(x509.NewCertPool()) {
		t.Errorf("the pool of a CA: %v, %v", pool, err)
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		empty:                         "--x-ca-file",
		filepath.Join(dir, "missing"): "--x-ca-file: ",
	} {
		if _, err := ReadCertPool("x-ca-file", file); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v", file, err)
		}
	}
}
