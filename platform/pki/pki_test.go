package pki

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func open(t *testing.T, dir string) *CA {
	t.Helper()
	ca, err := OpenCA(dir, "ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func leaf(t *testing.T, ca *CA, l Leaf) (cert *x509.Certificate, created bool) {
	t.Helper()
	crt, key, created, err := ca.Leaf(l)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf, created
}

func TestLeafUsage(t *testing.T) {
	ca := open(t, t.TempDir())
	cert, _ := leaf(t, ca, Leaf{
		Name:       "serving",
		CommonName: "server",
		SANs:       []string{"localhost", "127.0.0.1"},
		Usage:      Server,
	})
	pem, _ := os.ReadFile(ca.CertFile())
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	for _, host := range []string{"localhost", "127.0.0.1"} {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, DNSName: host}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if _, err := cert.Verify(x509.VerifyOptions{
		Roots:     pool,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err == nil {
		t.Error("a server's certificate is good as a client's")
	}
	if life := time.Until(cert.NotAfter); life > leafLifetime {
		t.Errorf("it lives for %v", life)
	}
}

// A matching, young certificate is reused. Any difference creates a new certificate.
func TestLeafRenewal(t *testing.T) {
	dir := t.TempDir()
	ca := open(t, dir)
	l := Leaf{
		Name:          "leaf",
		CommonName:    "who",
		Organizations: []string{"group"},
		SANs:          []string{"localhost"},
		Usage:         Client | Server,
	}
	if _, created := leaf(t, ca, l); !created {
		t.Fatal("the first leaf was not created")
	}
	if _, created := leaf(t, open(t, dir), l); created {
		t.Error("an equal leaf was created again")
	}
	for name, change := range map[string]func(*Leaf){
		"a name":        func(l *Leaf) { l.SANs = []string{"localhost", "other.example"} },
		"fewer names":   func(l *Leaf) { l.SANs = nil },
		"another group": func(l *Leaf) { l.Organizations = []string{"other"} },
		"another user":  func(l *Leaf) { l.CommonName = "other" },
		"another usage": func(l *Leaf) { l.Usage = Client },
	} {
		changed := l
		change(&changed)
		if _, created := leaf(t, ca, changed); !created {
			t.Errorf("%s: the old one was kept", name)
		}
		leaf(t, ca, l)
	}
	// A certificate past renewAfter, and a certificate of another CA.
	for name, build := range map[string]func(*CA) error{
		"an old one": func(ca *CA) error {
			t := template(l.CommonName, l.Organizations, leafLifetime)
			t.NotBefore, t.NotAfter = time.Now().Add(-leafLifetime*2/3), time.Now().Add(leafLifetime/3)
			t.DNSNames, t.ExtKeyUsage = l.SANs, l.Usage.extended()
			return write(filepath.Join(dir, "leaf.crt"), filepath.Join(dir, "leaf.key"), t, ca.cert, ca.key, ca.key)
		},
		"one from a clock that was ahead": func(ca *CA) error {
			t := template(l.CommonName, l.Organizations, leafLifetime)
			t.NotBefore, t.NotAfter = time.Now().Add(time.Hour), time.Now().Add(leafLifetime)
			t.DNSNames, t.ExtKeyUsage = l.SANs, l.Usage.extended()
			return write(filepath.Join(dir, "leaf.crt"), filepath.Join(dir, "leaf.key"), t, ca.cert, ca.key, ca.key)
		},
		"another CA's": func(*CA) error {
			other := open(t, t.TempDir())
			crt, _, _, err := other.Leaf(l)
			if err != nil {
				return err
			}
			return os.Rename(crt, filepath.Join(dir, "leaf.crt"))
		},
	} {
		if err := build(ca); err != nil {
			t.Fatal(err)
		}
		if _, created := leaf(t, ca, l); !created {
			t.Errorf("%s was kept", name)
		}
	}
}

// A leaf whose key is of another certificate is created again.
func TestALeafWithAnotherKeyIsReplaced(t *testing.T) {
	dir := t.TempDir()
	ca, l := open(t, dir), Leaf{Name: "leaf", CommonName: "user", Usage: Client}
	leaf(t, ca, l)
	leaf(t, ca, Leaf{Name: "other", CommonName: "user", Usage: Client})
	if err := os.Rename(filepath.Join(dir, "other.key"), filepath.Join(dir, "leaf.key")); err != nil {
		t.Fatal(err)
	}
	if _, created := leaf(t, ca, l); !created {
		t.Error("a certificate with the key of another is used")
	}
}

// A CA that is not valid yet is refused: the clock may be wrong.
func TestACAOfAnotherTimeIsRefused(t *testing.T) {
	dir := t.TempDir()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	c := template("test", nil, caLifetime)
	c.NotBefore, c.IsCA, c.BasicConstraintsValid = time.Now().Add(time.Hour), true, true
	if err := write(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), c, c, k, k); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCA(dir, "ca", "test"); err == nil || !strings.Contains(err.Error(), "correct the clock") {
		t.Errorf("got %v", err)
	}
}

// An interrupted start is repeated: before the key has its name, and before its public part has it. A key without its
// public part may be in use, and stays.
func TestAnInterruptedStartIsRepeated(t *testing.T) {
	for files, create := range map[[2]string]func(dir string) error{
		{"ca.key", "ca.crt"}: func(dir string) error {
			_, err := OpenCA(dir, "ca", "test")
			return err
		},
		{"sa.key", "sa.pub"}: func(dir string) error {
			_, _, err := ServiceAccountKeys(dir)
			return err
		},
	} {
		t.Run(files[0], func(t *testing.T) {
			dir := t.TempDir()
			key, public := filepath.Join(dir, files[0]), filepath.Join(dir, files[1])
			if err := os.WriteFile(key+temporary, []byte("-----BEG"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := create(dir); err != nil {
				t.Fatal(err)
			}
			created, err := os.ReadFile(key)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(public, public+temporary); err != nil {
				t.Fatal(err)
			}
			if err := create(dir); err != nil {
				t.Errorf("only the last file has no name: %v", err)
			}
			other := t.TempDir()
			if err := create(other); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(filepath.Join(other, files[1]), public+temporary); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(public); err != nil {
				t.Fatal(err)
			}
			if err := create(dir); err == nil {
				t.Errorf("%s belongs to another key", files[1])
			}
			if err := os.Remove(public + temporary); err != nil {
				t.Fatal(err)
			}
			if err := create(dir); err == nil {
				t.Errorf("%s is missing, and no error says so", files[1])
			}
			if kept, err := os.ReadFile(key); err != nil || !bytes.Equal(kept, created) {
				t.Errorf("the key has changed: %v", err)
			}
		})
	}
}
