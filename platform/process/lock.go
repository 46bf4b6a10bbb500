package process

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// LockFile is the file of a data directory that the directory's process has locked. It has the process's id.
const LockFile = "lock"

// lockTimeout bounds the wait of Lock. Locked holds the lock for a moment.
const lockTimeout = 100 * time.Millisecond

// Lock locks a data directory for this process, until the file is closed. It fails if another process has locked it.
func Lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	for began := time.Now(); syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil; {
		if time.Since(began) > lockTimeout {
			pid, _ := os.ReadFile(f.Name())
			f.Close()
			return nil, fmt.Errorf("--data-dir %q is in use by process %s; stop it or choose another directory", dir,
				strings.TrimSpace(string(pid)))
		}
		time.Sleep(lockTimeout / 10)
	}
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return f, nil
}

// Locked reports whether a process has locked a data directory.
func Locked(dir string) bool {
	f, err := os.Open(filepath.Join(dir, LockFile))
	if err != nil {
		return false
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil
}
