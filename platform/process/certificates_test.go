package process

import (
	"os"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
)

// The metric has the first expiry of the certificates of a subject in a file: here of a leaf, after its CA.
func TestExpirationsOfCertificates(t *testing.T) {
	ca, err := pki.OpenCA(t.TempDir(), "ca", "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	crt, key, _, err := ca.Leaf(pki.Leaf{Name: "gateway", CommonName: "kubernetes", Usage: pki.Server})
	if err != nil {
		t.Fatal(err)
	}
	want := pki.Describe("--tls-cert-file", crt)[0].NotAfter.Unix()
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
	r.MustRegister(expirations{&Process{flags: fs}})
	families, err := r.Gather()
	if err != nil || len(families) != 1 || len(families[0].GetMetric()) != 1 {
		t.Fatalf("%v, %v", families, err)
	}
	if got := families[0].GetMetric()[0]; int64(got.GetGauge().GetValue()) != want {
		t.Errorf("%v, want %d", got, want)
	}
}
