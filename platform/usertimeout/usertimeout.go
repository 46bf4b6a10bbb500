// Package usertimeout sets TCP_USER_TIMEOUT (RFC 5482, tcp(7)) of the connections of a net.Dialer.
package usertimeout

import (
	"errors"
	"syscall"
	"time"
)

// Control returns the Control of a net.Dialer. It bounds how long the peer's kernel may not acknowledge data. A
// connection to a lost host then fails after the timeout, instead of after minutes.
func Control(timeout time.Duration) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var setErr error
		err := c.Control(func(fd uintptr) { setErr = set(int(fd), timeout) })
		return errors.Join(err, setErr)
	}
}
