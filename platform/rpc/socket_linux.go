package rpc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// SocketsSupported says whether services can speak over Unix sockets here: it takes a kernel that says who the peer is.
const SocketsSupported = true

// peerOf is the process at the other end of a socket, as the kernel has it (SO_PEERCRED of socket(7)): one of this
// user's.
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
		return fmt.Errorf("the process at the other end of the socket is user %d's, this one is %d's: run both as one "+
			"user, or give them host:port", uid, own)
	}
	return nil
}
