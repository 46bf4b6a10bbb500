package rpc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// ofThisUser says, as the kernel does (SO_PEERCRED of socket(7)), that the other end of a socket is a process of this
// user.
func ofThisUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *syscall.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) {
		peer, asked = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(err, asked); err != nil {
		return err
	}
	if peer.Uid != uint32(os.Geteuid()) {
		return fmt.Errorf("the process at the other end of the socket is user %d's; services that speak over Unix "+
			"sockets run as one user", peer.Uid)
	}
	return nil
}
