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

	"google.golang.org/grpc/credentials"

	"watershed.dev/platform/socket"
)

// Listen listens on host:port, or on unix:/path with socket.Listen.
func Listen(address string) (net.Listener, error) {
	if !strings.HasPrefix(address, socketScheme) {
		return net.Listen("tcp", address)
	}
	a, err := ParseAddress(address)
	if err == nil && !SocketsSupported {
		err = errors.New("services use Unix sockets on Linux only: want host:port")
	}
	if err != nil {
		return nil, err
	}
	return socket.Listen(a.Path)
}

// socketCredentials is TLS, except on a Unix socket. There both sides authenticate with the TLS handshake, and later
// bytes are not encrypted. The kernel carries them between two processes of the same user. The handshake detects a
// relay: the server sends the PID at the other end of its socket, and the client compares it with its own.
//
//	client                                server
//	check the peer's user                 check the peer's user
//	TLS handshake     <---------------->  TLS handshake
//
//	is it my PID?     <-----in TLS------  PID of the peer, from the kernel
//	echo the PID      ------in TLS----->  is it the same?
//	plain bytes       <---------------->  plain bytes
//
// A failed step closes the connection. The security level is the level of google.golang.org/grpc/credentials/local for
// sockets.
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
	var seen [pidBytes]byte // in TLS 1.3 this read also reports a rejected client certificate
	if _, err := io.ReadFull(encrypted, seen[:]); err != nil {
		return nil, nil, err
	}
	if pid := binary.BigEndian.Uint64(seen[:]); pid != uint64(os.Getpid()) {
		return nil, nil, fmt.Errorf("the server sees process %d in place of this one: a relay is between them, or "+
			"their PID namespaces differ (use host:port)", pid)
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
		slog.Warn("A connection was rejected", "error", err)
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

// pidBytes is the encoded size of a process ID.
const pidBytes = 8

// Clone implements credentials.TransportCredentials.
func (c socketCredentials) Clone() credentials.TransportCredentials {
	return socketCredentials{c.TransportCredentials.Clone()}
}

// recordReader reads at most one TLS record at a time from a connection (RFC 8446, section 5.1). The bytes after the
// last record are not TLS.
type recordReader struct {
	net.Conn
	rest []byte
}

const (
	recordHeader = 5
	// A record begins with its content type, from change_cipher_spec to application_data, and a version of 3.x.
	firstKind, lastKind = 20, 23
	majorVersion        = 3
	// maxRecord bounds the length of a record without its header: 2^14 bytes and the overhead of encryption.
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
			return 0, fmt.Errorf("not a TLS record: it begins with %q", header)
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

// done returns an error if the last record was not read to its end.
func (r *recordReader) done() error {
	if len(r.rest) > 0 {
		return errors.New("the handshake ends within a TLS record")
	}
	return nil
}
