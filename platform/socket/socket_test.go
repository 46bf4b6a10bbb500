package socket

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A path that names a file by mistake is not removed, and neither is the socket of a running process.
func TestOnlyUnusedSocketsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(path("file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path("directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"used", "unused"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path(name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		if name == "unused" {
			l.SetUnlinkOnClose(false)
			l.Close()
			continue
		}
		defer l.Close()
	}
	for name, listens := range map[string]bool{
		"file": false, "directory": false, "used": false, "unused": true, "new": true,
	} {
		l, err := Listen(path(name))
		if (err == nil) != listens {
			t.Errorf("%s: %v", name, err)
		}
		if info, err := os.Lstat(path(name)); err != nil || listens && info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
		if err == nil {
			l.Close()
		}
	}
}
