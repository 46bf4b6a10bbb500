package telemetry

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// An address that names a file by mistake removes nothing, and neither does the socket of a running process.
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
	for name, left := range map[string]bool{"file": true, "directory": true, "used": true, "unused": false} {
		removeUnusedSocket(path(name))
		if _, err := os.Lstat(path(name)); (err == nil) != left {
			t.Errorf("%s: %v", name, err)
		}
	}
}
