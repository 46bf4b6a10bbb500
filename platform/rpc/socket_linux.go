package rpc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// SocketsSupported reports if services can use Unix sockets: the kernel must report the peer's user.
const SocketsSupported = true

// peerOf returns the process at the other end of a socket, as the kernel reports it (SO_PEERCRED of socket(7)). It
// fails if the process belongs to another user.
func peerOf(conn *net.UnixConn) (pid int32, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *syscall.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		peer, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		return 0, err
	}
	return peer.Pid, sameUser(peer.Uid)
}

func sameUser(uid uint32) error {
	if own := os.Geteuid(); uid != uint32(own) {
		return fmt.Errorf("the peer's user is %d and this process's user is %d: run both as the same user, "+
			"or use host:port", uid, own)
	}
	return nil
}
