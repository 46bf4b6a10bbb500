package embedded

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
)

// damages are the ways in which the tests damage a file. nil removes the file.
var damages = map[string]func(data []byte) []byte{
	"removed": nil,
	"empty":   func([]byte) []byte { return nil },
	"half":    func(data []byte) []byte { return data[:len(data)/2] },
	"a bit":   func(data []byte) []byte { data[len(data)/3] ^= 4; return data },
}

// damage damages a file of a server that does not run.
func damage(t *testing.T, path, how string) {
	t.Helper()
	if damages[how] == nil {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		return
	}
	data, err := os.ReadFile(path)
	if err == nil && len(data) > 0 {
		err = os.WriteFile(path, damages[how](data), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// filesOf returns the files of a server's storage whose names match a pattern.
func filesOf(t *testing.T, n *NATS, pattern string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(n.storage(), func(path string, d fs.DirEntry, err error) error {
		if matches, _ := filepath.Match(pattern, filepath.Base(path)); matches && err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		if errors.Is(err, fs.ErrNotExist) { // a running server removes files
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// A damaged key costs no message. Readable keys stay: this test fails if NATS changes how it encrypts keys.
func TestADamagedKeyCostsNoMessage(t *testing.T) {
	t.Parallel()
	n := &NATS{Dir: t.TempDir(), KeyFile: secretKey(t)}
	unreadable := func(n *NATS) []string {
		t.Helper()
		key, err := os.ReadFile(n.KeyFile)
		if err != nil {
			t.Fatal(err)
		}
		keys, err := unreadableKeys(n.storage(), strings.TrimSpace(string(key)))
		if err != nil {
			t.Fatal(err)
		}
		return keys
	}
	stream := jetstream.StreamConfig{Name: "a", Subjects: []string{"a"}}
	runServer(t, n, func(js jetstream.JetStream) {
		if _, err := js.CreateStream(t.Context(), stream); err != nil {
			t.Fatal(err)
		}
		if _, err := js.Publish(t.Context(), "a", []byte("m")); err != nil {
			t.Fatal(err)
		}
	})
	dir := filepath.Join(n.storage(), "$G", "streams", "a")
	if err := os.CopyFS(filepath.Join(filepath.Dir(dir), ".b"), os.DirFS(dir)); err != nil { // a removed stream
		t.Fatal(err)
	}
	if keys := unreadable(n); keys != nil {
		t.Errorf("healthy keys are unreadable: %v", keys)
	}
	for _, how := range slices.Sorted(maps.Keys(damages)) {
		key := filepath.Join(dir, "meta.key")
		damage(t, key, how)
		if keys := unreadable(n); how != "removed" && !slices.Equal(keys, []string{key}) {
			t.Errorf("%s: %v is unreadable, want %s", how, keys, key)
		}
		runServer(t, n, func(js jetstream.JetStream) {
			s, err := js.CreateOrUpdateStream(t.Context(), stream)
			if err != nil {
				t.Fatal(err)
			}
			if m, err := s.GetMsg(t.Context(), 1); err != nil || string(m.Data) != "m" {
				t.Errorf("%s: message %v, %v", how, m, err)
			}
		})
	}
	n.KeyFile = ""
	if _, err := n.start(); err == nil || !strings.Contains(err.Error(), "--jetstream-key-file is required") {
		t.Errorf("encrypted storage without a key: %v", err)
	}

	c := clusterOf(t, 3)
	for _, n := range c.servers {
		startMember(t, n)
	}
	log, js := c.log(t)
	eventually(t, func() error {
		_, err := log.Stream(t.Context(), js)
		return err
	})
	for _, n := range c.servers {
		eventually(t, func() error { // the leader responds before the others have all keys
			if keys := filesOf(t, n, "meta.key"); len(keys) != 3 || unreadable(n) != nil {
				return fmt.Errorf("the keys of %s: %v, unreadable %v", n.Name, keys, unreadable(n))
			}
			return nil
		})
	}
}

func TestCorruptSnapshots(t *testing.T) {
	storage := t.TempDir()
	dir := filepath.Join(storage, "$SYS", "_js_", "_meta_", "snapshots")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ name, corrupt string }{
		{"snap.1.2.tmp", ""},
		{"other", ""},
		{"snap.1.2", "snap.1.2"},
		{"snap.1.3", "snap.1.3"},
		{"snap.1.1", "snap.1.3"},
		{"snap.2.1", "snap.2.1"},
	} {
		if err := os.WriteFile(filepath.Join(dir, test.name), make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		want := ""
		if test.corrupt != "" {
			want = filepath.Join(dir, test.corrupt)
		}
		if got, err := corruptSnapshot(storage); err != nil || got != want {
			t.Errorf("with %s, %q is corrupt, %v; want %q", test.name, got, err, want)
		}
	}
	n := NATS{Dir: filepath.Join(t.TempDir(), "nats")}
	if err := os.MkdirAll(n.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(storage, n.storage()); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(n.storage(), "$SYS", "_js_", "_meta_", "meta.key")
	if err := os.WriteFile(key, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, cluster := range []string{"", "127.0.0.1:1"} {
		n.Cluster = cluster
		if err := n.removeDamaged(""); err == nil {
			t.Error("encrypted storage is opened without a key")
		}
		if err := n.removeCorrupt(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(n.storage()); (err == nil) != (cluster == "") {
			t.Errorf("the storage of a server with the cluster address %q: %v", cluster, err)
		}
	}
}

// A server whose storage has a damaged file accepts messages. It may have lost the log.
func TestAServerStartsWithADamagedFile(t *testing.T) {
	t.Parallel()
	n := &NATS{Dir: t.TempDir(), KeyFile: secretKey(t)}
	log := eventlog.Options{Storage: "file", Replicas: 1, Retention: time.Minute, MaxBytes: 1 << 20}
	publish := func(js jetstream.JetStream) {
		eventually(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := log.Stream(ctx, js); err != nil {
				return err
			}
			_, err := js.Publish(ctx, "watershed.progress", make([]byte, 1<<10))
			return err
		})
	}
	runServer(t, n, publish)
	for _, how := range slices.Sorted(maps.Keys(damages)) {
		for _, path := range filesOf(t, n, "*") {
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				continue // the server has replaced the file since
			}
			t.Log(how, path)
			damage(t, path, how)
			runServer(t, n, publish)
		}
	}
}

// A server of a cluster whose storage has a damaged file has a current copy of the log again.
func TestAServerOfAClusterStartsWithADamagedFile(t *testing.T) {
	t.Parallel()
	c := clusterOf(t, 3)
	var m member
	for _, n := range c.servers {
		m = startMember(t, n)
	}
	damaged := c.servers[2]
	log, js := c.log(t)
	start := time.Now()
	current := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s, err := log.Stream(ctx, js)
		if err != nil {
			return err
		}
		have := s.CachedInfo().Cluster
		if have == nil || have.LeaderSince == nil {
			return fmt.Errorf("the log has no leader: %+v", have)
		}
		if have.Leader == damaged.Name && have.LeaderSince.After(start) {
			return nil
		}
		for _, r := range have.Replicas {
			if r.Name == damaged.Name && r.Current && !r.Offline && r.Active < time.Since(start) {
				return nil
			}
		}
		return fmt.Errorf("%s has no current copy: %+v", damaged.Name, have)
	}
	eventually(t, current)
	for _, how := range slices.Sorted(maps.Keys(damages)) {
		for _, path := range filesOf(t, damaged, "*") {
			m.kill(t)
			t.Log(how, path)
			if snapshot, err := corruptSnapshot(damaged.storage()); err != nil || snapshot != "" && !isEmpty(snapshot) {
				t.Errorf("a healthy snapshot is corrupt: %q, %v", snapshot, err)
			}
			if _, err := os.Stat(path); err == nil { // else the server has replaced the file since
				damage(t, path, how)
			}
			start = time.Now()
			m = startMember(t, damaged)
			eventually(t, current)
		}
	}
}

// isEmpty reports whether a file is empty. A server that is killed may have made a snapshot without its data.
func isEmpty(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Size() == 0
}

// A server of a cluster that cannot read its storage starts without it. A single server has the only copy.
func TestUnreadableStorageIsRemoved(t *testing.T) {
	corrupt := errors.New("NATS does not start: Can't start JetStream: corrupt state file")
	message := errors.New("NATS does not start: Can't start JetStream: malformed or corrupt message in 1.blk: " +
		"sanity check failed (dlen 1037343783 slen 65507 rl 1037343805 index 0 lbuf 711576)")
	for _, test := range []struct {
		cluster string
		start   error
		removed bool
	}{
		{"", corrupt, false},
		{"127.0.0.1:1", errors.New("NATS is not ready after 20 s"), false},
		{"127.0.0.1:1", corrupt, true},
		{"127.0.0.1:1", message, true},
		{"", message, false},
	} {
		n := NATS{Dir: t.TempDir(), Cluster: test.cluster}
		if err := os.MkdirAll(n.storage(), 0o700); err != nil {
			t.Fatal(err)
		}
		removed, err := n.removeUnreadable(test.start)
		_, missing := os.Stat(n.storage())
		if removed != test.removed || err != nil || errors.Is(missing, fs.ErrNotExist) != removed {
			t.Errorf("%q, %v: removed %t, %v, %v", test.cluster, test.start, removed, err, missing)
		}
	}
}
