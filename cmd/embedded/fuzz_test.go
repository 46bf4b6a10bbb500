package embedded

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/minio/highwayhash"
)

// Any file in place of a key or a snapshot of NATS is sound or damaged. A sound file is found damaged after each change
// of a byte.
func FuzzDamagedFiles(f *testing.F) {
	group := sha256.Sum256([]byte("group"))
	sound := make([]byte, 40)
	sum := make([]byte, 8)
	binary.LittleEndian.PutUint64(sum, highwayhash.Sum64(sound, group[:]))
	f.Add(append(sound, sum...), "snap.1.2", 3)
	f.Add([]byte{}, "snap.1.99999999999999999999", 0)
	f.Add(bytes.Repeat([]byte{1}, 28), "snap.-1.2", 0)
	f.Add([]byte("x"), "snap.01.2", 1)
	f.Add([]byte("LJ6FQ3WPSZ7EVT2ONKX4DCYB5A"), "..", 1)
	f.Fuzz(func(t *testing.T, data []byte, name string, at int) {
		changed := bytes.Clone(data)
		if len(data) > 0 {
			changed[uint(at)%uint(len(data))]++
		}
		if isSnapshot("group", data) && isSnapshot("group", changed) || opens("key", "group", "name", data) {
			t.Errorf("%q is sound", data)
		}
		if name != filepath.Base(name) || name == "." || name == ".." || len(name) > 100 {
			return
		}
		dir := t.TempDir()
		for _, d := range []string{"a/_js_/group/snapshots", "a/streams/s"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		key := filepath.Join(dir, "a/streams/s/meta.key")
		if err := os.WriteFile(key, data, 0o600); err != nil {
			t.Fatal(err)
		}
		snapshot := filepath.Join(dir, "a/_js_/group/snapshots", name)
		if err := os.WriteFile(snapshot, data, 0o600); err != nil {
			return // not a name of a file
		}
		if got, err := corruptSnapshot(dir); err != nil || got != "" && (got != snapshot || isSnapshot("group", data)) {
			t.Errorf("%q, %v", got, err)
		}
		if keys, err := unreadableKeys(dir, "key"); err != nil || len(keys) != 1 || keys[0] != key {
			t.Errorf("%q, %v", keys, err)
		}
	})
}
