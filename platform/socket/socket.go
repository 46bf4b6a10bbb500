// Package socket listens on Unix sockets for the processes of this user. It starts no goroutine.
package socket

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// Listen listens on a Unix socket that only this user may open. It removes the socket of a killed process. It
// fails with EADDRINUSE if a process still listens on the socket. If two processes remove the same socket at once, the
// first may listen on a socket without a name. A path is therefore for a single process.
func Listen(path string) (net.Listener, error) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		c, err := net.Dial("unix", path)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("a process listens there: %w", syscall.EADDRINUSE)
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			if err := os.Remove(path); err != nil {
				return nil, err
			}
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}
