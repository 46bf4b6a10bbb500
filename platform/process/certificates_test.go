package process

import (
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
)

// The metrics have the validity of the certificate of a subject that expires first: here of a leaf, after its CA.
func TestExpirationsOfCertificates(t *testing.T) {
	ca, err := pki.OpenCA(t.TempDir(), "ca", "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	crt, key, _, err := ca.Leaf(pki.Leaf{Name: "gateway", CommonName: "kubernetes", Usage: pki.Server})
	if err != nil {
		t.Fatal(err)
	}
	want := pki.Describe("--tls-cert-file", crt)[0]
	leaf, err := os.ReadFile(crt)
	if err != nil {
		t.Fatal(err)
	}
	both, err := os.ReadFile(ca.CertFile())
	if err == nil {
		err = os.WriteFile(crt, append(both, leaf...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	for flag, file := range map[string]string{"tls-cert-file": crt, "tls-private-key-file": key, "client-ca-file": ""} {
		fs.String(flag, file, "")
	}
	r := prometheus.NewRegistry()
	r.MustRegister(expirations{(&Process{flags: fs}).certificates})
	families, err := r.Gather()
	if err != nil || len(families) != 2 {
		t.Fatalf("%v, %v", families, err)
	}
	for i, want := range []time.Time{want.NotAfter, want.NotBefore} {
		m := families[i].GetMetric()
		if len(m) != 1 || int64(m[0].GetGauge().GetValue()) != want.Unix() {
			t.Errorf("%v, want %v", families[i], want)
		}
	}
}
