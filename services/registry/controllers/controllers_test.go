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
	fs := pflag.NewFlagSet("loops", pflag.ContinueOnError)
	l.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	return l
}

// An address that is none stops the start, by the name of its flag.
func TestAdvertiseAddress(t *testing.T) {
	l := newControllers(t, "--advertise-address=192.0.2.1")
	if err := l.Prepare(); err != nil || l.address.String() != "192.0.2.1" {
		t.Errorf("%v, %v", l.address, err)
	}
	if err := newControllers(t, "--advertise-address=example.com").Prepare(); err == nil ||
		!strings.Contains(err.Error(), `--advertise-address "example.com"`) {
		t.Errorf("%v", err)
	}
}

// The proxy's certificate is read each time: it is replaced while the registry runs. One that cannot be read is none.
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

// Trust that cannot be read stops the loops, and so another registry may try.
func TestUnreadableClientCA(t *testing.T) {
	l := newControllers(t, "--client-ca-file="+filepath.Join(t.TempDir(), "none"))
	if err := l.publishTrust(t.Context()); err == nil {
		t.Error("a file that is not there is published")
	}
}
