package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

const encryption = `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - aesgcm: {keys: [{name: k, secret: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=}]}
`

// Every registry can read a data key, and etcd stores it encrypted as the values of its resource.
func TestDataKeyIsEncrypted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	if err := os.WriteFile(file, []byte(encryption), 0o600); err != nil {
		t.Fatal(err)
	}
	fx := fixture.New(t, "--encryption-provider-config="+file)
	s := fx.Resources.Storage
	secrets, _ := s.ByName("secrets")
	prefix := s.OwnKey("data-keys/")
	ours, theirs := storage.NewDataKeys(s, "data-keys/", 0), storage.NewDataKeys(s, "data-keys/", 0)
	id, secret, err := ours.Current(t.Context(), secrets)
	if err != nil || len(secret) != eventlog.KeyBytes {
		t.Fatal(len(secret), err)
	}
	if again, _, _ := ours.Current(t.Context(), secrets); again != id {
		t.Errorf("a second key is made: %s, %s", id, again)
	}
	for _, keys := range []*storage.DataKeys{ours, theirs} {
		if got, err := keys.Get(t.Context(), secrets, id); err != nil || !bytes.Equal(got, secret) {
			t.Errorf("%v", err)
		}
	}
	// The end of a publisher's term is no error of the key.
	ended, end := context.WithCancel(t.Context())
	end()
	if _, _, err := theirs.Current(ended, secrets); err == nil {
		t.Error("a key is made after the end of the term")
	}
	// A full etcd stores no further key.
	fx.SetFull(t, true)
	if same, _, err := storage.NewDataKeys(s, "data-keys/", 0).Current(t.Context(), secrets); err != nil || same != id {
		t.Errorf("a full etcd's key is %s, %v", same, err)
	}
	fx.SetFull(t, false)
	other, _, err := theirs.Current(t.Context(), secrets)
	if err != nil || other == id {
		t.Errorf("two registries encrypt with the same key: %v", err)
	}
	all, err := s.Client.Client.Get(t.Context(), prefix+"secrets/", clientv3.WithPrefix())
	if err != nil || len(all.Kvs) != 2 {
		t.Fatal(all.Count, err)
	}
	for _, kv := range all.Kvs {
		if !storage.Encrypted(kv.Value) || bytes.Contains(kv.Value, secret) {
			t.Errorf("%s is not encrypted", kv.Key)
		}
	}
	if _, err := ours.Get(t.Context(), secrets, "1-none"); !errors.Is(err, eventlog.ErrNoKey) {
		t.Errorf("%v", err)
	}
	// A key that was copied to another name is invalid.
	if _, err := s.Client.Client.Put(t.Context(), prefix+"secrets/2-moved",
		string(all.Kvs[0].Value)); err != nil {
		t.Fatal(err)
	}
	if _, err := ours.Get(t.Context(), secrets, "2-moved"); !errors.Is(err, eventlog.ErrNoKey) {
		t.Errorf("%v", err)
	}
	// A key is deleted dataKeyRetention after the next key was made.
	for _, key := range []string{"1000000000-a", "1000000001-b"} {
		if _, err := s.Client.Client.Put(t.Context(), prefix+"secrets/"+key, "x"); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := storage.NewDataKeys(s, "data-keys/", 0).Current(t.Context(), secrets); err != nil {
		t.Fatal(err)
	}
	left, err := s.Client.Client.Get(t.Context(), prefix+"secrets/", clientv3.WithPrefix(),
		clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range left.Kvs {
		if strings.HasSuffix(string(kv.Key), "/1000000000-a") {
			t.Errorf("%s is still there", kv.Key)
		}
	}
}

// A key is not used after a restore of etcd that lacks it: no other registry could decrypt its events.
func TestDataKeyIsConfirmed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	if err := os.WriteFile(file, []byte(encryption), 0o600); err != nil {
		t.Fatal(err)
	}
	s := fixture.New(t, "--encryption-provider-config="+file).Resources.Storage
	secrets, _ := s.ByName("secrets")
	keys := storage.NewDataKeys(s, "data-keys/", 0)
	current := func() string {
		t.Helper()
		id, _, err := keys.Current(t.Context(), secrets)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	id := current()
	keys.Unconfirm()
	if again := current(); again != id {
		t.Errorf("etcd has the key %s, and another is used: %s", id, again)
	}
	if _, err := s.Client.Client.Delete(t.Context(), s.OwnKey("data-keys/secrets/"+id)); err != nil {
		t.Fatal(err)
	}
	keys.Unconfirm()
	if again := current(); again == id {
		t.Error("etcd lacks the key, and it is used")
	}
}

// etcd holds a key for as long as the log has events that it encrypts.
func TestDataKeysOutliveTheLog(t *testing.T) {
	s := fixture.New(t).Resources.Storage
	secrets, _ := s.ByName("secrets")
	below := s.OwnKey("data-keys/secrets/")
	const day = 24 * time.Hour
	for _, age := range []time.Duration{10 * day, 9 * day} {
		key := fmt.Sprintf("%s%d-a", below, time.Now().Add(-age).Unix())
		if _, err := s.Client.Client.Put(t.Context(), key, "x"); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		retention time.Duration
		keys      int64
	}{{30 * day, 3}, {day, 3}} { // each creates a key, and the second deletes the oldest
		if _, _, err := storage.NewDataKeys(s, "data-keys/", test.retention).Current(t.Context(), secrets); err != nil {
			t.Fatal(err)
		}
		got, err := s.Client.Client.Get(t.Context(), below, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil || got.Count != test.keys {
			t.Errorf("with a retention of %s etcd has %d keys, not %d: %v", test.retention, got.Count, test.keys, err)
		}
	}
}
