package storage_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig/controller"

	"watershed.dev/services/registry/internal/fixture"
)

// A changed encryption file takes effect while the registry runs. Its first key encrypts writes, and all its keys
// decrypt. An invalid file changes nothing. A file that lacks a key hides only objects that the key encrypted.
func TestEncryptionFileReload(t *testing.T) {
	before := controller.EncryptionConfigFileChangePollDuration
	controller.EncryptionConfigFileChangePollDuration = 50 * time.Millisecond
	t.Cleanup(func() { controller.EncryptionConfigFileChangePollDuration = before })
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	keys := func(names ...string) string {
		text := "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n" +
			"- resources: [secrets]\n  providers:\n  - aesgcm:\n      keys:\n"
		for _, n := range names { // a key of 32 bytes
			text += fmt.Sprintf("      - {name: %s, secret: %sAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=}\n", n, n[:1])
		}
		return text
	}
	write(keys("first"))
	fx := fixture.New(t, "--encryption-provider-config="+file, "--encryption-provider-config-automatic-reload")
	secrets := fx.Client.CoreV1().Secrets("default")
	n := 0
	// by returns the name of the key that encrypts a new Secret.
	by := func(ctx context.Context) string {
		t.Helper()
		n++
		name := fmt.Sprintf("s%d", n)
		if _, err := secrets.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		resp, err := fx.Resources.Storage.Client.Client.Get(ctx, "/registry/secrets/default/"+name)
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("%v, %v", resp, err)
		}
		rest, ok := bytes.CutPrefix(resp.Kvs[0].Value, []byte("k8s:enc:aesgcm:v1:"))
		if !ok {
			t.Fatalf("etcd has %.40q", resp.Kvs[0].Value)
		}
		key, _, _ := bytes.Cut(rest, []byte(":"))
		return string(key)
	}
	until := func(condition string, met func() bool) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); !met(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not in time: %s", condition)
			}
		}
	}
	reads := func(name string) error {
		_, err := secrets.Get(t.Context(), name, metav1.GetOptions{})
		return err
	}
	if got := by(t.Context()); got != "first" {
		t.Fatalf("the key is %s", got)
	}
	write(keys("second", "first"))
	until("the second key writes", func() bool { return by(t.Context()) == "second" })
	if err := reads("s1"); err != nil {
		t.Errorf("a Secret of the first key: %v", err)
	}
	last := fmt.Sprintf("s%d", n)
	for _, bad := range []string{"kind: Nonsense", strings.ReplaceAll(keys("third"), "AAAAAAAA", "")} {
		write(bad)
		time.Sleep(200 * time.Millisecond) // several polls of the file, after which nothing may have changed
	}
	if got := by(t.Context()); got != "second" {
		t.Errorf("after an invalid file the key is %s", got)
	}
	write(keys("second"))
	until("the first key is gone", func() bool { return reads("s1") != nil })
	if err := reads("s1"); !strings.Contains(err.Error(), "no matching key was found") {
		t.Errorf("a Secret of the first key: %v", err)
	}
	if err := reads(last); err != nil {
		t.Errorf("a Secret of the second key: %v", err)
	}
}
