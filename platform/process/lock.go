package process

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// LockFile is the file of a data directory that the directory's process has locked. It has the process's id.
const LockFile = "lock"

// lockTimeout bounds the wait for a lock that is held for a moment. Locked holds it, and so does a child of the process
// that had it, until the child's exec.
const lockTimeout = time.Second

// lock locks a file until it is closed, and waits for lockTimeout. Its error is EWOULDBLOCK if another process has the
// lock.
func lock(f *os.File) error {
	began := time.Now()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Since(began) > lockTimeout {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Lock locks a data directory for this process, until the file is closed. It fails if another process has locked it.
func Lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if lock(f) != nil {
		pid, _ := os.ReadFile(f.Name())
		f.Close()
		return nil, fmt.Errorf("--data-dir %q is in use by process %s; stop it or choose another directory", dir,
			strings.TrimSpace(string(pid)))
	}
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return f, nil
}

// LockStore locks the directory of etcd's or NATS' data for this process, until the file is closed. It creates no file
// in the directory, because tools of etcd want an empty directory, and because a full disk must not prevent a start. A
// file system that cannot lock a directory, such as NFS, is not an error.
func LockStore(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if errors.Is(lock(f), syscall.EWOULDBLOCK) {
		f.Close()
		return nil, fmt.Errorf("--data-dir %q is in use by another process; stop it or choose another directory", dir)
	}
	return f, nil
}

// CheckFree returns an error if this process cannot listen on a host:port. Servers of other projects report the error
// late, or without the flag.
func CheckFree(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	return l.Close()
}

// Locked reports whether a process has locked a data directory.
func Locked(dir string) bool {
	// Another user's directory may have a pipe or a link of this name.
	f, err := os.OpenFile(filepath.Join(dir, LockFile), syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil
}
