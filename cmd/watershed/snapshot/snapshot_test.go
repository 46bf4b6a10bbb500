package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"watershed.dev/platform/process"
)

// A data directory of split lists its members. A directory of up has a single member.
func TestMembers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ws[1]") // the name is no pattern
	if all, err := MembersOf(dir); err != nil || len(all) != 1 || all[0].Dir != filepath.Join(dir, "etcd") {
		t.Errorf("%+v, %v", all, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"0", "1"} {
		text := "name: etcd-" + n + "\ndata-dir: /d/etcd-" + n + "\nlisten-peer-urls: https://h:" + n + "\n"
		if err := os.WriteFile(filepath.Join(dir, "config", "etcd-"+n+".yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := MembersOf(dir)
	want := Member{
		Dir:  filepath.Join(dir, "etcd-1"),
		Name: "etcd-1",
		Peer: "https://h:1",
	}
	if err != nil || all[1] != want {
		t.Errorf("%+v, %v", all, err)
	}
	single := filepath.Join(dir, "etcd") // the members were moved away, and up has run since
	if err := os.Mkdir(single, 0o700); err != nil {
		t.Fatal(err)
	}
	if all, err := MembersOf(dir); err != nil || len(all) != 1 || all[0] != (Member{Dir: single}) {
		t.Errorf("%+v, %v", all, err)
	}
}

// Bad input is a line that names the flag or the file, and nothing is moved.
func TestBadInput(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "backup.db")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	locked, err := process.Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer locked.Close()
	check := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	_, err = lock(dir)
	check("in use by process", err)
	_, err = lock(filepath.Join(dir, "absent"))
	check("--data-dir", err)
	check("backup.db", (&Restore{File: file, DataDir: dir}).Run(os.Stderr))
	used, err := process.Lock(dir + "/etcd") // as etcd locks its database
	if err != nil {
		t.Fatal(err)
	}
	defer used.Close()
	check("a process uses it", (&Restore{File: used.Name(), DataDir: dir}).Run(os.Stderr))
	check("exists", (&Save{File: file, DataDir: dir}).run("https://127.0.0.1:1"))
	check("no etcd runs in this directory", (&Save{File: file, DataDir: dir}).Run(context.Background(), os.Stderr))
	check("connection refused", (&Save{File: filepath.Join(dir, "new.db"), DataDir: dir}).run("https://127.0.0.1:1"))
	check("0 arguments: want a file", SaveCommand(pflag.NewFlagSet("save", pflag.ContinueOnError))())
	check("0 arguments: want a file", RestoreCommand(pflag.NewFlagSet("restore", pflag.ContinueOnError))())
	check("want save FILE", Command(pflag.NewFlagSet("snapshot", pflag.ContinueOnError))())
	if _, err := os.Stat(filepath.Join(dir, "etcd")); err != nil {
		t.Error(err)
	}
}

// run saves a snapshot of a server.
func (s *Save) run(server string) error {
	s.Servers = []string{server}
	return s.Run(context.Background(), os.Stderr)
}

// A restore that fails changes nothing. A restore into the directory of an etcd elsewhere is refused.
func TestAFailedRestoreChangesNothing(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "etcd", "member", "snap")
	if err := os.MkdirAll(data, 0o700); err != nil {
		t.Fatal(err)
	}
	newDatabase(t, filepath.Join(data, "db"))
	snapshot := filepath.Join(dir, "backup.db")
	check := func(want string) {
		t.Helper()
		err := (&Restore{File: snapshot, DataDir: dir}).Run(io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, not %q", err, want)
		}
		if files, err := filepath.Glob(filepath.Join(dir, "etcd*", "member")); err != nil || len(files) != 1 ||
			files[0] != filepath.Join(dir, "etcd", "member") {
			t.Errorf("there are %q, %v", files, err)
		}
	}
	text, err := os.ReadFile(filepath.Join(data, "db"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, text []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("backup.db", text)
	check("it is incomplete")
	write("backup.db", withHash(text))
	check("has no lock and no pki")
	write("pki/ca.crt", nil)
	write("config/etcd-0.yaml", []byte("name: etcd-0\ndata-dir: etcd\ninitial-cluster: etcd-1=https://a:1\n"))
	check("is not restored") // the cluster does not have the member
	write(EtcdServersFile, []byte("https://a:1\n"))
	check("its etcd is https://a:1")
}

// newDatabase creates an etcd database without objects.
func newDatabase(t *testing.T, path string) {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(func(tx *bbolt.Tx) error {
		for _, name := range []string{"cluster", "key", "meta"} {
			if _, err := tx.CreateBucket([]byte(name)); err != nil {
				return err
			}
		}
		return nil
	}), db.Close()); err != nil {
		t.Fatal(err)
	}
}

// withHash appends the hash of a snapshot to a database.
func withHash(database []byte) []byte {
	sum := sha256.Sum256(database)
	return slices.Concat(database, sum[:])
}

// A snapshot from standard input replaces the data of a stopped member. The old data is moved aside.
func TestAMemberIsRestoredFromStandardInput(t *testing.T) {
	dir := t.TempDir()
	newDatabase(t, filepath.Join(dir, "db"))
	text, err := os.ReadFile(filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	restore := func(snapshot []byte) error {
		r := Restore{Member: Member{Dir: data + "/", Name: "etcd-0", Peer: "https://a:1"}}
		remove, err := r.readFrom(bytes.NewReader(snapshot))
		if err != nil {
			return err
		}
		defer remove()
		return r.Run(io.Discard)
	}
	check := func(want string, err error, directories ...string) {
		t.Helper()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
		found, err := filepath.Glob(filepath.Join(dir, "data*"))
		if err != nil || len(found) != len(directories) {
			t.Errorf("there are %q, %v, want %q", found, err, directories)
		}
		for i, pattern := range directories {
			if ok, err := filepath.Match(pattern, filepath.Base(found[i])); !ok || err != nil {
				t.Errorf("there is %s, want %s", found[i], pattern)
			}
		}
	}
	if err := os.Mkdir(data, 0o700); err != nil { // as the directory of a new volume
		t.Fatal(err)
	}
	whole := withHash(text)
	check("", restore(whole), "data")
	check("it is incomplete", restore(whole[:1000]), "data") // the connection was lost
	whole[0]++
	check("it is damaged", restore(whole), "data")
	whole[0]--
	db, err := os.Open(filepath.Join(data, "member", "snap", "db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(db.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	check("a process uses it", restore(whole), "data")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	check("", restore(whole), "data", "data.before-*")
	if err := os.RemoveAll(filepath.Join(data, "member")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "other"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check("no data of etcd", restore(whole), "data", "data.before-*")
}

// Directories keep their names if any cannot be renamed, such as a mount point.
func TestMovesAreUndone(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"etcd", "restored"} {
		if err := os.Mkdir(path(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	moves := []move{
		{path("etcd"), path("etcd.before")},
		{path("restored"), path("etcd")},
		{path("absent"), path("nats")},
	}
	if err := moveAll(moves); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	for _, name := range []string{"etcd", "restored"} {
		if _, err := os.Stat(path(name)); err != nil {
			t.Error(err)
		}
	}
	if err := moveAll(moves[:2]); err != nil {
		t.Error(err)
	}
}

// A snapshot is of the first member of split that listens.
func TestSaveUsesAMemberThatListens(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, address := range map[string]string{"etcd-0": "127.0.0.1:1", "etcd-1": listener.Addr().String()} {
		text := fmt.Sprintf("data-dir: %s\nlisten-client-urls: https://%s/\n", name, address)
		if err := os.WriteFile(filepath.Join(dir, "config", name+".yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := &Save{DataDir: dir}
	if err := s.ofDataDir(); err != nil || fmt.Sprint(s.Servers) != fmt.Sprintf("[https://%s/]", listener.Addr()) {
		t.Errorf("%q, %v", s.Servers, err)
	}
}
