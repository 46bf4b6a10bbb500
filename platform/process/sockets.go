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

// maxSocketDir bounds the path of a directory for sockets, because a socket's path has at most 108 bytes.
const maxSocketDir = 80

// SocketDir returns the directory for dir's sockets, as an absolute path. It is dir, unless the path is too long or has
// characters that an address may not have (rpc.ParseAddress). Then it is a short directory of this user in
// $XDG_RUNTIME_DIR or the system's directory for temporary files.
func SocketDir(dir string) (string, error) {
	dir, err := Resolve(dir)
	if err != nil {
		return "", err
	}
	if socketsFit(dir) {
		return dir, nil
	}
	root := os.Getenv("XDG_RUNTIME_DIR")
	if info, err := os.Stat(root); root == "" || err == nil && info.Mode()&os.ModeSticky != 0 { // /tmp in containers
		root = filepath.Join(os.TempDir(), fmt.Sprintf("watershed-%d", os.Geteuid()))
	}
	sum := sha256.Sum256([]byte(dir))
	short := filepath.Join(root, fmt.Sprintf("watershed-%x", sum[:8]))
	if !socketsFit(short) {
		const text = "--data-dir %q cannot hold sockets, and %q cannot either: choose a shorter path of plain letters"
		return "", fmt.Errorf(text, dir, short)
	}
	err = os.MkdirAll(short, 0o700)
	for _, d := range []string{root, short} { // other users may create directories in root's parent
		if err == nil {
			err = RestrictDirectory(d)
		}
	}
	if err != nil {
		const text = "--data-dir %q cannot hold sockets, and %q is not safe for them: %w; " +
			"choose another --data-dir"
		return "", fmt.Errorf(text, dir, short, err)
	}
	return short, nil
}

// Resolve returns the absolute path of a directory, without symbolic links if the directory exists.
func Resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if target, err := filepath.EvalSymlinks(dir); err == nil {
		return target, nil
	}
	return dir, nil
}

// socketsFit reports if sockets in a directory have valid addresses.
func socketsFit(dir string) bool {
	_, err := rpc.ParseAddress(rpc.Address{Path: dir}.String())
	return err == nil && len(dir) < maxSocketDir
}

// RestrictDirectory lets only this user access a directory, because it holds keys and sockets. It fails if
// CheckDirectory does.
func RestrictDirectory(dir string) error {
	mode, err := CheckDirectory(dir)
	if err == nil && mode.Perm()&0o077 != 0 {
		err = os.Chmod(dir, 0o700)
	}
	return err
}

// CheckDirectory returns the mode of a directory. It fails if the directory is of another user, or for all users, such
// as /tmp.
func CheckDirectory(dir string) (os.FileMode, error) {
	info, err := os.Lstat(dir)
	if err != nil {
		return 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(st.Uid) != os.Geteuid() {
		return 0, errors.New("it is not a directory of this user; choose another directory")
	}
	if info.Mode()&os.ModeSticky != 0 && info.Mode().Perm()&0o002 != 0 { // an empty directory may be a new volume
		if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
			return 0, errors.New("it is a directory for all users; choose a directory in it")
		}
	}
	return info.Mode(), nil
}

// HasForeignFiles reports whether a directory is open to other users, and has files but no data directory's files. The
// directory of a new volume has lost+found.
func HasForeignFiles(dir string) bool {
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm()&0o077 == 0 {
		return false
	}
	files, _ := os.ReadDir(dir)
	others := false
	for _, f := range files {
		switch f.Name() {
		case LockFile, "pki":
			return false
		case "lost+found":
		default:
			others = true
		}
	}
	return others
}
