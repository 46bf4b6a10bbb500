package upgrade

import (
	"bufio"
	"context"
	"net"
	"net/http"
)

// hijackableWriter is a ResponseWriter. Once its connection is hijacked, closing the connection cancels a context.
type hijackableWriter struct {
	http.ResponseWriter
	// untie detaches the new context from the request's context.
	untie  func() bool
	cancel context.CancelFunc
}

// Unwrap lets http.ResponseController find the writer's other methods.
func (t *hijackableWriter) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Flush implements http.Flusher.
func (t *hijackableWriter) Flush() { _ = http.NewResponseController(t.ResponseWriter).Flush() }

// Hijack implements http.Hijacker.
func (t *hijackableWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	t.untie()
	return &cancelingConn{conn, t.cancel}, buffered, nil
}

// cancelingConn is a hijacked connection whose Close cancels a context.
type cancelingConn struct {
	net.Conn
	cancel context.CancelFunc
}

// Close implements net.Conn.
func (c *cancelingConn) Close() error {
	c.cancel()
	return c.Conn.Close()
}
