package controllers

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

func newControllers(t *testing.T, flags ...string) *Controllers {
	t.Helper()
	l := &Controllers{Informers: informers.NewSharedInformerFactory(fake.NewClientset(), 0)}
	fs := pflag.NewFlagSet("controllers", pflag.ContinueOnError)
	l.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	return l
}

// An invalid address stops the start. The error has the name of the flag.
func TestAdvertiseAddress(t *testing.T) {
	if _, err := newControllers(t, "--advertise-address=example.com").Prepare(); err == nil ||
		!strings.Contains(err.Error(), `--advertise-address "example.com"`) {
		t.Errorf("%v", err)
	}
}

// A lease of coordinated leader election must be longer than its renewal, which must be longer than a retry.
func TestDurationsOfCoordinatedElection(t *testing.T) {
	for flag, valid := range map[string]bool{
		"lease-duration=11s": true, "lease-duration=10s": false, "renew-deadline=15s": false, "retry-period=10s": false,
	} {
		err := newControllers(t, "--coordinated-leadership-"+flag).Validate()
		const named = "--coordinated-leadership-lease-duration "
		if (err == nil) != valid || err != nil && !strings.Contains(err.Error(), named) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// proxyCertificate reads the files on each call, because they are replaced while the registry runs. It returns nil if
// it cannot read them.
func TestProxyCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	l := newControllers(t)
	if c, k := l.proxyCertificate(); c != nil || k != nil {
		t.Errorf("%s %s", c, k)
	}
	l = newControllers(t, "--proxy-client-cert-file="+cert, "--proxy-client-key-file="+key)
	if c, k := l.proxyCertificate(); c != nil || k != nil {
		t.Errorf("%s %s", c, k)
	}
	for _, content := range []string{"one", "two"} {
		for _, file := range []string{cert, key} {
			if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if c, k := l.proxyCertificate(); string(c) != content || string(k) != content {
			t.Errorf("%s %s", c, k)
		}
	}
}
