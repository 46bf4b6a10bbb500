//go:build !linux

package rpc

import (
	"errors"
	"net"
)

// ofThisUser is asked of Linux alone.
func ofThisUser(*net.UnixConn) error {
	return errors.New("services speak over Unix sockets on Linux alone; give them host:port")
}
