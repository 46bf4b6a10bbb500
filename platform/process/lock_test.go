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
