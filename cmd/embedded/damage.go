package embedded

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"regexp"

	"github.com/minio/highwayhash"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/crypto/chacha20poly1305"
)

// storage returns the directory of JetStream's files.
func (n *NATS) storage() string { return filepath.Join(n.Dir, server.JetStreamStoreDir) }

// removeDamaged removes damaged files that NATS cannot start with.
func (n *NATS) removeDamaged(key string) error {
	err := n.removeUnreadableKeys(key) // first: it refuses encrypted storage without a key
	if err == nil {
		err = n.removeCorrupt()
	}
	if err != nil {
		return fmt.Errorf("--data-dir %q: %w", n.Dir, err)
	}
	return nil
}

// removeCorrupt removes the storage of a server of a cluster if a snapshot of a Raft group is corrupt. JetStream would
// not start, or would have no copy of a stream. Without the snapshot, the group's log has no beginning. A single server
// reads no snapshots, and has the only copy.
func (n *NATS) removeCorrupt() error {
	if n.Cluster == "" {
		return nil
	}
	if err := os.RemoveAll(n.removed()); err != nil { // the rest of an earlier removal
		return err
	}
	snapshot, err := corruptSnapshot(n.storage())
	if err != nil || snapshot == "" {
		return err
	}
	slog.Error("A snapshot of NATS is corrupt, and the server starts with empty storage", "snapshot", snapshot)
	return n.removeStorage()
}

// corruptStorage matches the error of a start with a damaged message of the Raft group of JetStream itself, or without
// the key of a block. NATS' server calls these errCorruptState and errBadMsg.
var corruptStorage = regexp.MustCompile(`corrupt state file|malformed or corrupt message`)

// removeUnreadable removes the storage of a server of a cluster if start is the error of a start with corrupt storage.
// Not every damaged message ends a start.
func (n *NATS) removeUnreadable(start error) (removed bool, err error) {
	if n.Cluster == "" || !corruptStorage.MatchString(start.Error()) {
		return false, nil
	}
	slog.Error("NATS cannot read its storage, and starts with empty storage", "directory", n.Dir, "error", start)
	return true, n.removeStorage()
}

func (n *NATS) removed() string { return n.storage() + ".corrupt" }

// removeStorage removes the storage. The server then receives copies from the other servers of its cluster.
func (n *NATS) removeStorage() error {
	if err := os.Rename(n.storage(), n.removed()); err != nil {
		return err
	}
	return os.RemoveAll(n.removed())
}

// corruptSnapshot returns the file of a Raft group's corrupt snapshot, or an empty string. NATS reads only the latest
// snapshot of a group, and removes the others.
func corruptSnapshot(storage string) (string, error) {
	snapshots, err := fs.Glob(os.DirFS(storage), "*/_js_/*/snapshots/*")
	if err != nil {
		return "", err
	}
	const format = "snap.%d.%d" // NATS removes files with other names
	type position struct{ term, index uint64 }
	latest := map[string]position{} // by directory
	for _, snapshot := range snapshots {
		var p position
		dir, name := path.Split(snapshot)
		if _, err := fmt.Sscanf(name, format, &p.term, &p.index); err != nil ||
			name != fmt.Sprintf(format, p.term, p.index) {
			continue
		}
		if l := latest[dir]; p.term > l.term || p.term == l.term && p.index > l.index {
			latest[dir] = p
		}
	}
	for dir, p := range latest {
		file := filepath.Join(storage, dir, fmt.Sprintf(format, p.term, p.index))
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if !isSnapshot(path.Base(path.Dir(path.Clean(dir))), data) {
			return file, nil
		}
	}
	return "", nil
}

// isSnapshot reports whether the data of a snapshot of a Raft group have the right checksum at their end
// (raft.loadLastSnapshot).
func isSnapshot(group string, data []byte) bool {
	const minBytes = 28
	if len(data) < minBytes {
		return false
	}
	key := sha256.Sum256([]byte(group))
	sum := len(data) - highwayhash.Size64
	return binary.LittleEndian.Uint64(data[sum:]) == highwayhash.Sum64(data[:sum], key[:])
}

// removeUnreadableKeys removes the keys of streams and Raft groups that key cannot decrypt. NATS 2.15 panics at each
// start if such a key is shorter than a nonce, and it writes keys without fsync. With another damaged key, JetStream
// does not start, or has no stream. If a key is missing, NATS makes another. Messages have other keys.
func (n *NATS) removeUnreadableKeys(key string) error {
	keys, err := unreadableKeys(n.storage(), key)
	if err != nil {
		return err
	}
	if len(keys) > 0 && key == "" {
		return errors.New("it is encrypted, so --jetstream-key-file is required")
	}
	for _, file := range keys {
		slog.Error("NATS' key of a stream or Raft group cannot be decrypted, and is removed: it is damaged, or the key "+
			"of JetStream has changed", "file", file, "jetstream-key-file", n.KeyFile)
		if err := os.Remove(file); err != nil {
			return err
		}
	}
	return nil
}

// unreadableKeys returns the files of the keys of streams and Raft groups that cannot be decrypted. NATS encrypts them
// with keys that it derives from the server's key and two names (Server.jsKeyGen, fileStore.recoverAEK).
func unreadableKeys(storage, key string) (keys []string, err error) {
	for pattern, infoOf := range map[string]func(dir string) string{
		"*/streams/[^.]*": func(dir string) string { return path.Base(path.Dir(path.Dir(dir))) }, // the account
		"*/_js_/*":        path.Base,
	} {
		files, err := fs.Glob(os.DirFS(storage), pattern+"/"+server.JetStreamMetaFileKey)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			sealed, err := os.ReadFile(filepath.Join(storage, file))
			if err != nil {
				return nil, err
			}
			if dir := path.Dir(file); !opens(key, infoOf(dir), path.Base(dir), sealed) {
				keys = append(keys, filepath.Join(storage, file))
			}
		}
	}
	return keys, nil
}

// opens reports whether NATS can decrypt the sealed key of a stream or Raft group.
func opens(key, info, name string, sealed []byte) bool {
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(info + name))
	aead, err := chacha20poly1305.NewX(mac.Sum(nil))
	if err != nil || len(sealed) < aead.NonceSize() {
		return false
	}
	_, err = aead.Open(nil, sealed[:aead.NonceSize()], sealed[aead.NonceSize():], nil)
	return err == nil
}
