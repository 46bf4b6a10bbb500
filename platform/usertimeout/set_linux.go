package usertimeout

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func set(fd int, timeout time.Duration) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(timeout.Milliseconds()))
}

// Of returns the timeout of a TCP connection. Tests of dialers use it.
func Of(c syscall.Conn) (timeout time.Duration, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var getErr error
	err = raw.Control(func(fd uintptr) {
		var ms int
		ms, getErr = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		timeout = time.Duration(ms) * time.Millisecond
	})
	return timeout, errors.Join(err, getErr)
}
