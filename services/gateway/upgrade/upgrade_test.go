package upgrade

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"
)

// A client that sends a byte after the gateway has closed an upgraded connection still receives all that was written.
// The request ends with the client.
func TestAClosedConnectionDeliversItsLastBytes(t *testing.T) {
	response := append([]byte("HTTP/1.1 101 Switching Protocols\r\n\r\n"), make([]byte, 128<<10)...)
	c := serveAndClose(t, lingerTimeout, response)
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, response) {
		t.Errorf("%d bytes of %d, %v", len(got), len(response), err)
	}
	select {
	case <-c.ended:
		t.Error("the request ends before its client has closed the connection")
	default:
	}
	c.Close()
	c.expectEnd(t)
}

// A closed connection does not wait for its client without an upgrade, or while the client sends without an end. It
// waits for a while for a client that does nothing, also if a write is blocked.
func TestAClosedConnectionEnds(t *testing.T) {
	const upgraded = "HTTP/1.1 101 Switching Protocols\r\n\r\n"
	serveAndClose(t, lingerTimeout, []byte("HTTP/1.1 404 Not Found\r\n\r\n")).expectEnd(t)
	serveAndClose(t, 100*time.Millisecond, []byte(upgraded)).expectEnd(t)
	serveAndClose(t, 100*time.Millisecond, []byte(upgraded), make([]byte, longWrite)).expectEnd(t)
	c := serveAndClose(t, lingerTimeout, []byte(upgraded))
	go func() {
		for b := make([]byte, 1<<20); ; {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	c.expectEnd(t)
}

// testConn is a client's connection that the gateway has closed. ended is closed with its request.
type testConn struct {
	net.Conn
	ended chan struct{}
}

func (c *testConn) expectEnd(t *testing.T) {
	t.Helper()
	select {
	case <-c.ended:
	case <-time.After(lingerTimeout * 5 / 6):
		t.Error("the request continues")
	}
}

// longWrite is the length of a write that the sockets do not hold.
const longWrite = 64 << 20

// writingConn signals the beginning of a long write.
type writingConn struct {
	*tls.Conn
	writing chan struct{}
}

// Write implements net.Conn.
func (c writingConn) Write(p []byte) (int, error) {
	if len(p) >= longWrite {
		close(c.writing)
	}
	return c.Conn.Write(p)
}

// serveAndClose returns a connection on which a handler has written a response. The handler has closed the connection,
// and waits for its end for a time. It reads and writes through the ReadWriter, as a WebSocket does. At the end it
// writes the rest, which the client does not read.
func serveAndClose(t *testing.T, timeout time.Duration, response []byte, rest ...[]byte) *testConn {
	t.Helper()
	closed, c := make(chan struct{}), &testConn{ended: make(chan struct{})}
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer close(c.ended)
		w, req, end := WithCloseCancel(w, req)
		defer end()
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		lingering := conn.(*lingeringConn)
		lingering.timeout = timeout
		socket, writing := lingering.Conn.(*tls.Conn), make(chan struct{})
		lingering.Conn = writingConn{socket, writing}
		raw := socket.NetConn()
		// the kernel holds the bytes that the client does not read
		if err := raw.(*net.TCPConn).SetWriteBuffer(4 * len(response)); err != nil {
			t.Error(err)
		}
		sent, err := rw.ReadString('.')
		if err != nil || sent != "early." {
			t.Errorf("%q, %v", sent, err)
		}
		reading := make(chan error)
		go func() {
			_, err := io.Copy(io.Discard, rw)
			reading <- err
		}()
		_, err = rw.Write(response)
		err = errors.Join(err, rw.Flush())
		for _, p := range rest {
			go func() { _, _ = conn.Write(p) }()
			<-writing
		}
		if err := errors.Join(err, conn.Close()); err != nil {
			t.Error(err)
		}
		if req.Context().Err() == nil {
			t.Error("the context continues after the connection")
		}
		// A WebSocket reads on, and sets a deadline after each message.
		if err := conn.SetDeadline(time.Now().Add(time.Hour)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a deadline of a closed connection: %v", err)
		}
		close(closed)
		end()
		if err := <-reading; !errors.Is(err, net.ErrClosed) {
			t.Errorf("a read of a closed connection: %v", err)
		}
	}))
	t.Cleanup(srv.Close)
	small := func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10)
		}), err)
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Control: small}, Config: &tls.Config{InsecureSkipVerify: true}}
	var err error
	if c.Conn, err = d.DialContext(t.Context(), "tcp", srv.Listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\nearly.")
	<-closed
	return c
}
