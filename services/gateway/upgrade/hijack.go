package upgrade

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// hijackableWriter is a ResponseWriter. Once its connection is hijacked, closing the connection cancels a context.
type hijackableWriter struct {
	http.ResponseWriter
	// untie detaches the new context from the request's context.
	untie  func() bool
	cancel context.CancelFunc
	// conn is the hijacked connection, or nil. A WebSocket is hijacked in another goroutine.
	conn atomic.Pointer[lingeringConn]
}

// Unwrap lets http.ResponseController find the writer's other methods.
func (t *hijackableWriter) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Flush implements http.Flusher.
func (t *hijackableWriter) Flush() { _ = http.NewResponseController(t.ResponseWriter).Flush() }

// Hijack implements http.Hijacker. The ReadWriter uses the returned connection.
func (t *hijackableWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	t.untie()
	c := &lingeringConn{Conn: conn, cancel: t.cancel, timeout: lingerTimeout, closed: make(chan struct{})}
	t.conn.Store(c)
	received, err := buffered.Peek(buffered.Reader.Buffered())
	if err != nil {
		return nil, nil, err
	}
	from := io.MultiReader(bytes.NewReader(received), c)
	return c, bufio.NewReadWriter(bufio.NewReader(from), bufio.NewWriter(c)), nil
}

// end cancels the context, closes the connection and waits until its socket is closed.
func (t *hijackableWriter) end() {
	t.untie()
	t.cancel()
	if c := t.conn.Load(); c != nil {
		_ = c.Close()
		<-c.closed
	}
}

const (
	// lingerTimeout bounds the wait of a closed connection for its client. It is nginx's default lingering_time.
	lingerTimeout = 30 * time.Second
	// lingerBytes bounds the bytes that a closed connection discards. The buffers of the two sockets hold less
	// (net.ipv4.tcp_rmem and tcp_wmem).
	lingerBytes = 64 << 20
)

// lingeringConn is a hijacked connection. Its Close cancels a context. If the connection is upgraded, Close sends EOF,
// and closes the socket once the client has closed its own. Upstream closes the socket at once. If the client then
// sends anything, such as a WebSocket ping, the kernel resets the connection. The reset discards all bytes that it has
// not sent: the end of the output of a command.
//
//	open --- Close, after a response 101 ---> lingering --- the client's EOF, lingerTimeout, lingerBytes ---> closed.
//	open --- Close, after another response ---> closed.
//
// For its user, a lingering connection is closed. Upstream's WebSockets otherwise read on, and extend its deadline.
type lingeringConn struct {
	net.Conn
	cancel context.CancelFunc
	// timeout is lingerTimeout, except in tests.
	timeout time.Duration
	// closed is closed with the socket.
	closed chan struct{}

	mu sync.Mutex
	// upgraded: the response has the status 101. written: the response has begun. closing: Close was called.
	upgraded, written, closing bool
}

// Close implements net.Conn. It does not wait for the client.
func (c *lingeringConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	c.closing = true
	c.cancel()
	half, ok := c.Conn.(interface{ CloseWrite() error })
	// Without a deadline, a write that the client does not accept would delay CloseWrite.
	if !ok || !c.upgraded || c.Conn.SetDeadline(time.Now().Add(c.timeout)) != nil {
		defer close(c.closed)
		return c.Conn.Close()
	}
	go func() {
		defer close(c.closed)
		defer c.Conn.Close()
		_ = half.CloseWrite()
		_, _ = io.CopyN(io.Discard, c.Conn, lingerBytes)
	}()
	return nil
}

// whileOpen calls f, unless Close was called.
func (c *lingeringConn) whileOpen(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	return f()
}

// Read implements net.Conn.
func (c *lingeringConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if closed := c.whileOpen(func() error { return nil }); closed != nil {
		return 0, closed
	}
	return n, err
}

// Write implements net.Conn.
func (c *lingeringConn) Write(p []byte) (int, error) {
	err := c.whileOpen(func() error {
		if !c.written {
			c.written, c.upgraded = true, bytes.HasPrefix(p, []byte("HTTP/1.1 101 "))
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// SetDeadline implements net.Conn.
func (c *lingeringConn) SetDeadline(t time.Time) error {
	return c.whileOpen(func() error { return c.Conn.SetDeadline(t) })
}

// SetReadDeadline implements net.Conn.
func (c *lingeringConn) SetReadDeadline(t time.Time) error {
	return c.whileOpen(func() error { return c.Conn.SetReadDeadline(t) })
}

// SetWriteDeadline implements net.Conn.
func (c *lingeringConn) SetWriteDeadline(t time.Time) error {
	return c.whileOpen(func() error { return c.Conn.SetWriteDeadline(t) })
}
