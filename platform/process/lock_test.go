package process

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// A data directory is locked by a single process, and Locked does not keep another from locking it.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	if Locked(dir) {
		t.Error("an empty directory is locked")
	}
	first, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !Locked(dir) {
		t.Error("it is not locked")
	}
	if _, err := Lock(dir); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("by process %d;", os.Getpid())) {
		t.Errorf("%v", err)
	}
	first.Close()
	if Locked(dir) {
		t.Error("it is locked after the process has ended")
	}
	second, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
}

// A store is locked by a single process, and the lock is no file.
func TestLockStore(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		first, err := LockStore(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := LockStore(dir); err == nil || !strings.Contains(err.Error(), "is in use by another process;") {
			t.Errorf("%v", err)
		}
		first.Close()
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("%v, %v", files, err)
	}
}
