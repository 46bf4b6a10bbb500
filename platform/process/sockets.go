package process

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"watershed.dev/platform/rpc"
)

// maxSocketDir is how long the path of a directory may be for sockets in it: a socket's path has 108 bytes.
const maxSocketDir = 80

// SocketDir is where sockets for dir go: in it, or in a short place of this user's own where its path is too long for a
// socket, or has what an address may not have (rpc.ParseAddress).
func SocketDir(dir string) (string, error) {
	if socketsFit(dir) {
		return dir, nil
	}
	root := os.Getenv("XDG_RUNTIME_DIR")
	if root == "" {
		root = filepath.Join(os.TempDir(), fmt.Sprintf("watershed-%d", os.Geteuid()))
	}
	sum := sha256.Sum256([]byte(dir))
	short := filepath.Join(root, fmt.Sprintf("watershed-%x", sum[:8]))
	if !socketsFit(short) {
		const text = "--data-dir %q is no path for sockets, nor is %q: choose a shorter and plainer one"
		return "", fmt.Errorf(text, dir, short)
	}
	err := os.MkdirAll(short, 0o700)
	for _, d := range []string{root, short} { // in a place where anybody may make directories, ours must be ours
		if err == nil {
			err = RestrictDirectory(d)
		}
	}
	if err != nil {
		const text = "--data-dir %q is no path for sockets, and the place for them, %q, is not safe: %w; " +
			"choose another one"
		return "", fmt.Errorf(text, dir, short, err)
	}
	return short, nil
}

// socketsFit says whether sockets in a directory have addresses.
func socketsFit(dir string) bool {
	_, err := rpc.ParseAddress(rpc.Address{Path: dir}.String())
	return err == nil && len(dir) < maxSocketDir
}

// RestrictDirectory makes sure that nobody else can put anything into a directory: keys and sockets are there.
func RestrictDirectory(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(st.Uid) != os.Geteuid() {
		return errors.New("it is no directory of this user's own; choose another one")
	}
	if info.Mode().Perm()&0o077 != 0 {
		return os.Chmod(dir, 0o700)
	}
	return nil
}
