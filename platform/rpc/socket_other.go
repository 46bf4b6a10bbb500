//go:build !linux

package rpc

import (
	"errors"
	"net"
)

// SocketsSupported reports if services can use Unix sockets: the kernel must report the peer's user.
const SocketsSupported = false

func peerOf(*net.UnixConn) (pid int32, err error) {
	return 0, errors.New("services use Unix sockets on Linux only: want host:port")
}
