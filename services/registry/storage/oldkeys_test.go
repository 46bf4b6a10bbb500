package storage_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

// The first log that starts takes the epoch and the data keys of an older release. The next log has an epoch of its
// own, and no log starts beside a registry of the older release.
func TestOldKeysMoveOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	if err := os.WriteFile(file, []byte(encryption), 0o600); err != nil {
		t.Fatal(err)
	}
	s := fixture.New(t, "--encryption-provider-config="+file).Resources.Storage
	etcd := s.Client.Client
	put := func(key, value string) {
		t.Helper()
		if _, err := etcd.Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	secrets, _ := s.ByName("secrets")
	id, secret, err := storage.OldDataKeys(s).Current(t.Context(), secrets)
	if err != nil {
		t.Fatal(err)
	}
	put("/watershed/history", "the epoch")
	put("/watershed/publisher", "host-1")
	first := storage.NewDataKeys(s, "logs/first/data-keys/")
	if err := first.MoveOldKeys(t.Context(), s.OwnKey("first")); err == nil || !strings.Contains(err.Error(), "host-1") {
		t.Errorf("beside an older release: %v", err)
	}
	if _, err := etcd.Delete(t.Context(), "/watershed/publisher"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"first", "first", "second"} {
		if err := first.MoveOldKeys(t.Context(), s.OwnKey(name)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := first.Get(t.Context(), secrets, id); err != nil || !bytes.Equal(got, secret) {
		t.Errorf("the moved data key: %v", err)
	}
	for key, want := range map[string]int64{s.OwnKey("first"): 1, s.OwnKey("second"): 0, "/watershed/": 0} {
		resp, err := etcd.Get(t.Context(), key, clientv3.WithPrefix())
		if err != nil || resp.Count != want {
			t.Errorf("%s: %d keys, not %d (%v)", key, resp.Count, want, err)
		}
	}
}
