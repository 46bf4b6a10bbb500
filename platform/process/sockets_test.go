package process

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Only this user can write to the directory of keys and sockets (S16).
func TestRestrictDirectory(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := RestrictDirectory(open); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(open); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("its mode is %v: %v", info.Mode(), err)
	}
	link, file := filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := os.Symlink(open, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	shared := filepath.Join(dir, "shared") // such as /tmp
	volume := filepath.Join(dir, "volume") // of a container: new and empty
	for _, d := range []string{shared, volume} {
		if err := errors.Join(os.Mkdir(d, 0o777), os.Chmod(d, 0o777|os.ModeSticky)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(shared, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := RestrictDirectory(volume); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{link, file, shared, filepath.Join(dir, "none")} {
		if err := RestrictDirectory(bad); err == nil {
			t.Errorf("%s is accepted as a directory of this user", bad)
		}
	}
	if os.Geteuid() != 0 {
		return // only root can create another user's directory
	}
	foreign := filepath.Join(dir, "foreign")
	if err := os.Mkdir(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(foreign, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if err := RestrictDirectory(foreign); err == nil {
		t.Error("another user's directory is accepted")
	}
}

func TestSocketDirOfALongPath(t *testing.T) {
	runtime, err := os.MkdirTemp("", "w") // shorter than t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runtime) })
	if err := os.Chmod(runtime, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	if got, err := SocketDir("/srv/w"); got != "/srv/w" || err != nil {
		t.Errorf("a short path is replaced by %q, %v", got, err)
	}
	t.Chdir(runtime)
	if got, err := SocketDir("w"); got != filepath.Join(runtime, "w") || err != nil {
		t.Errorf("the sockets of a relative path lie in %q, %v", got, err)
	}
	long := "/srv/" + strings.Repeat("w", 100)
	got, err := SocketDir(long)
	if other, _ := SocketDir(long + "x"); filepath.Dir(got) != runtime || got == other || err != nil {
		t.Errorf("sockets lie in %q, %v", got, err)
	}
	for _, dir := range []string{"/srv/a b", "/srv/a,b", "/srv/a%b", "/srv/ü"} { // not in addresses
		if got, err := SocketDir(dir); filepath.Dir(got) != runtime || err != nil {
			t.Errorf("%s: sockets lie in %q, %v", dir, got, err)
		}
	}
	for _, d := range []string{runtime, got} {
		if info, err := os.Stat(d); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", d, info, err)
		}
	}
	shared := filepath.Join(runtime, "shared") // some containers set the variable to /tmp
	if err := errors.Join(os.Mkdir(shared, 0o777), os.Chmod(shared, 0o777|os.ModeSticky)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", runtime)
	t.Setenv("XDG_RUNTIME_DIR", shared)
	if got, err := SocketDir(long); filepath.Dir(filepath.Dir(got)) != runtime || err != nil {
		t.Errorf("sockets lie in %q, %v", got, err)
	}
	if err := os.Symlink(runtime, "link"); err != nil {
		t.Fatal(err)
	}
	if got, err := SocketDir("link"); got != runtime || err != nil {
		t.Errorf("the sockets of a link lie in %q, %v", got, err)
	}
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(runtime, "a b"))
	if got, err := SocketDir(long); err == nil || !strings.Contains(err.Error(), "--data-dir") {
		t.Errorf("sockets lie in %q, %v", got, err)
	}
}

// A start makes its directory private. It refuses a directory that others use, such as /var/lib.
func TestADirectoryOfOthersIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		files   []string
		mode    os.FileMode
		refused bool
	}{
		"empty":             {nil, 0o755, false},
		"a new volume":      {[]string{"lost+found"}, 0o755, false},
		"files of others":   {[]string{"x"}, 0o755, true},
		"own files":         {[]string{"x"}, 0o700, false},
		"a data directory":  {[]string{"lock", "x"}, 0o755, false},
		"a PKI of its own":  {[]string{"pki", "x"}, 0o755, false},
		"readable by group": {[]string{"x"}, 0o750, true},
	} {
		dir := t.TempDir()
		for _, f := range c.files {
			if err := os.Mkdir(filepath.Join(dir, f), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		if got := HasForeignFiles(dir); got != c.refused {
			t.Errorf("%s: %v", name, got)
		}
	}
}
