// Package porttest reserves ports for the servers of tests.
package porttest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

// FreePort returns a port as UnusedPort does.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := UnusedPort()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// UnusedPort returns a port without a listener. The port is below ip_local_port_range, so no connection takes it before
// the caller listens. It is also below the node ports and the ports of `split`. No other call returns it, in this
// process and in other tests that run meanwhile.
func UnusedPort() (int, error) {
	const lowest, highest = 12000, 19999
	for range 1000 {
		port := lowest + rand.IntN(highest-lowest)
		if !reserve(port) {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port, nil
		}
	}
	return 0, errors.New("no port is free")
}

// reserved has the locked files of the ports that this process has reserved. The end of the process unlocks them.
var reserved sync.Map

// reserve reserves a port for this process, and reports whether no process had reserved it.
func reserve(port int) bool {
	dir := filepath.Join(os.TempDir(), "watershed-test-ports")
	if os.MkdirAll(dir, 0o700) != nil {
		return true
	}
	file, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return true // the directory is another user's
	}
	if syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		file.Close()
		return false
	}
	reserved.Store(port, file)
	return true
}
