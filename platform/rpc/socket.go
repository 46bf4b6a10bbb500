package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"

	"google.golang.org/grpc/credentials"
)

// Listen listens on host:port, or on unix:/path as ListenSocket does.
func Listen(address string) (net.Listener, error) {
	if !strings.HasPrefix(address, socketScheme) {
		return net.Listen("tcp", address)
	}
	a, err := ParseAddress(address)
	if err == nil && !SocketsSupported {
		err = errors.New("services speak over Unix sockets on Linux alone: want host:port")
	}
	if err != nil {
		return nil, err
	}
	return ListenSocket(a.Path)
}

// ListenSocket listens on a Unix socket, which nobody but this user may open. What a killed process left of it is taken
// away; one on which somebody still listens is not. Of two that take the same one away at once one may be left alone:
// whoever gives out paths sees to it that there is one process for each.
func ListenSocket(path string) (net.Listener, error) {
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

// socketCredentials is TLS, but where a connection is a Unix socket: there both sides prove who they are by TLS' handshake,
// and what they say after it crosses as it is. The kernel carries it between two processes of one user, whom it is
// asked for, and nobody stands between them: the last that they say within TLS is which process the server sees at the
// other end, and that the client is that one. Its level of security is what google.golang.org/grpc/credentials/local
// has for sockets.
type socketCredentials struct {
	credentials.TransportCredentials
}

// ClientHandshake implements credentials.TransportCredentials. gRPC closes conn when ctx is done.
func (c socketCredentials) ClientHandshake(ctx context.Context, authority string,
	conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return c.TransportCredentials.ClientHandshake(ctx, authority, conn)
	}
	if _, err := peerOf(socket); err != nil {
		return nil, nil, err
	}
	records := &recordReader{Conn: conn}
	encrypted, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, records)
	if err != nil {
		return nil, nil, err
	}
	var seen [pidBytes]byte // also: in TLS 1.3 a client knows only now what the server thinks of its certificate
	if _, err := io.ReadFull(encrypted, seen[:]); err != nil {
		return nil, nil, err
	}
	if pid := binary.BigEndian.Uint64(seen[:]); pid != uint64(os.Getpid()) {
		return nil, nil, fmt.Errorf("the server sees process %d in place of this one: another stands between them, or "+
			"they see different processes (give them host:port)", pid)
	}
	if _, err := encrypted.Write(seen[:]); err != nil {
		return nil, nil, err
	}
	return conn, info, records.done()
}

// ServerHandshake implements credentials.TransportCredentials. gRPC has set a deadline on conn.
func (c socketCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return c.TransportCredentials.ServerHandshake(conn)
	}
	pid, err := peerOf(socket)
	if err != nil {
		slog.Warn("A connection is refused", "error", err)
		return nil, nil, err
	}
	records := &recordReader{Conn: conn}
	encrypted, info, err := c.TransportCredentials.ServerHandshake(records)
	if err != nil {
		return nil, nil, err
	}
	var sent, echoed [pidBytes]byte
	binary.BigEndian.PutUint64(sent[:], uint64(pid))
	if _, err := encrypted.Write(sent[:]); err != nil {
		return nil, nil, err
	}
	if _, err := io.ReadFull(encrypted, echoed[:]); err != nil {
		return nil, nil, err
	}
	if echoed != sent {
		return nil, nil, errors.New("the client is not the process at the other end of the socket")
	}
	return conn, info, records.done()
}

// pidBytes is how many bytes a process' id is said in.
const pidBytes = 8

// Clone implements credentials.TransportCredentials.
func (c socketCredentials) Clone() credentials.TransportCredentials {
	return socketCredentials{c.TransportCredentials.Clone()}
}

// recordReader is a connection of which no more is read than one record of TLS at a time (RFC 8446, section 5.1): what
// follows the last one is somebody else's.
type recordReader struct {
	net.Conn
	rest []byte
}

const (
	recordHeader = 5
	// A record begins with its kind, from change_cipher_spec to application_data, and a version of 3.x.
	firstKind, lastKind = 20, 23
	majorVersion        = 3
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
		if kind := header[0]; kind < firstKind || kind > lastKind || header[1] != majorVersion || n > maxRecord {
			return 0, fmt.Errorf("what begins with %q is no TLS", header)
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
