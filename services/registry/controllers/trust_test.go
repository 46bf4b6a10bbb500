package controllers

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/util/cert"
)

// newAuthority returns a certificate authority in PEM.
func newAuthority(t *testing.T, name string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c, err := cert.NewSelfSignedCACert(cert.Config{CommonName: name}, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: c.Raw}))
}

// A certificate authority that cannot be read stops the start, as in kube-apiserver. The error names the flag.
func TestUnreadableClientCA(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	for _, flag := range []string{"--client-ca-file", "--requestheader-client-ca-file"} {
		if _, err := newControllers(t, flag+"="+path).Prepare(); err == nil || !strings.Contains(err.Error(), flag+` "`) {
			t.Errorf("%v", err)
		}
	}
}

// A registry that is elected after its file of the client CA became empty publishes the last valid CA. It publishes
// a valid file as soon as it has changed.
func TestAnInvalidCADoesNotEndTheNextTerm(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ca.crt")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first, second := newAuthority(t, "first"), newAuthority(t, "second")
	write(first)
	cs := newControllers(t, "--client-ca-file="+path, "--advertise-address=none")
	if _, err := cs.Prepare(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	reloads := make(chan struct{})
	go func() {
		defer close(reloads)
		_ = cs.ReloadAuthorities(ctx)
	}()
	defer func() { cancel(); <-reloads }()
	client := fake.NewClientset()
	maps := client.CoreV1().ConfigMaps("kube-system")
	awaitPublished := func(authority string) {
		t.Helper()
		var published string
		if wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, 40*time.Second, true, // less than a refresh
			func(ctx context.Context) (bool, error) {
				m, err := maps.Get(ctx, "extension-apiserver-authentication", metav1.GetOptions{})
				if err == nil {
					published = m.Data["client-ca-file"]
				}
				return strings.Contains(published, strings.TrimSpace(authority)), nil
			}) != nil {
			t.Fatalf("published: %q", published)
		}
	}
	term, end := context.WithCancel(ctx)
	cs.trust.publish(term, client)
	awaitPublished(first)
	end()
	write("")
	if err := maps.Delete(ctx, "extension-apiserver-authentication", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	cs.trust.publish(ctx, client)
	awaitPublished(first)
	write(second)
	awaitPublished(second)
}
