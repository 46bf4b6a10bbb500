package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"google.golang.org/grpc/credentials"
)

// Socket is the path of an address that is a Unix socket, unix:/path as gRPC writes it (its doc/naming.md); the path is
// absolute.
func Socket(address string) (path string, ok bool) {
	path, ok = strings.CutPrefix(address, socketScheme)
	return path, ok && filepath.IsAbs(path) && filepath.Clean(path) == path
}

// SocketAddress is the address of the socket at a path.
func SocketAddress(path string) string { return socketScheme + path }

const socketScheme = "unix:"

// listen listens on host:port, or on a socket. What a killed process left of the socket is taken away; one on which
// somebody still listens is not.
func listen(address string) (net.Listener, error) {
	path, ok := Socket(address)
	switch {
	case !ok && strings.HasPrefix(address, socketScheme):
		return nil, errors.New("want host:port, or unix: and an absolute path")
	case !ok:
		return net.Listen("tcp", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		c, err := net.Dial("unix", path)
		if err == nil {
			c.Close()
			return nil, syscall.EADDRINUSE
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(path)
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

// onSockets is TLS, but where a connection is a Unix socket: there both sides prove who they are by TLS' handshake,
// and what they say after it crosses as it is. The kernel carries it between two processes of one user, which it is
// asked for; who could look into it could look into either of them.
type onSockets struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials. gRPC closes conn when ctx is done.
func (c onSockets) ClientHandshake(ctx context.Context, authority string,
	conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return c.TransportCredentials.ClientHandshake(ctx, authority, conn)
	}
	if err := ofThisUser(socket); err != nil {
		return nil, nil, err
	}
	records := &recordReader{Conn: conn}
	encrypted, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, records)
	if err == nil { // in TLS 1.3 a client knows only now what the server thinks of its certificate
		_, err = io.ReadFull(encrypted, make([]byte, len(welcome)))
	}
	if err == nil {
		err = records.done()
	}
	return conn, info, err
}

// ServerHandshake implements credentials.TransportCredentials. gRPC has set a deadline on conn.
func (c onSockets) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return c.TransportCredentials.ServerHandshake(conn)
	}
	if err := ofThisUser(socket); err != nil {
		return nil, nil, err
	}
	records := &recordReader{Conn: conn}
	encrypted, info, err := c.TransportCredentials.ServerHandshake(records)
	if err == nil {
		_, err = encrypted.Write([]byte(welcome))
	}
	if err == nil {
		err = records.done()
	}
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c onSockets) Clone() credentials.TransportCredentials {
	return onSockets{c.TransportCredentials.Clone()}
}

// welcome is what a server says, as the last record of TLS, to a client whose certificate is good.
const welcome = "\n"

// recordReader is a connection of which no more is read than one record of TLS at a time (RFC 8446, section 5.1): what
// follows the last one is somebody else's.
type recordReader struct {
	net.Conn
	rest []byte
}

const (
	recordHeader = 5
	// maxRecord is how long a record may be after its header: 2^14 bytes and what encryption adds.
	maxRecord = 1<<14 + 256
)

func (r *recordReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		header := make([]byte, recordHeader, recordHeader+maxRecord)
		if _, err := io.ReadFull(r.Conn, header); err != nil {
			return 0, err
		}
		n := int(binary.BigEndian.Uint16(header[recordHeader-2:]))
		if n > maxRecord {
			return 0, fmt.Errorf("a TLS record of %d bytes", n)
		}
		record := header[:recordHeader+n]
		if _, err := io.ReadFull(r.Conn, record[recordHeader:]); err != nil {
			return 0, err
		}
		r.rest = record
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// done is called after the last record; the error says that it was not read to its end.
func (r *recordReader) done() error {
	if len(r.rest) > 0 {
		return errors.New("the handshake ends within a TLS record")
	}
	return nil
}
