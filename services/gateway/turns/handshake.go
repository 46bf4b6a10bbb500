package turns

import (
	"context"
	"net"
	"time"
)

const (
	// handshakeReads is the number of reads of a connection whose bytes are processed in turns: the client's two
	// messages of a TLS handshake.
	handshakeReads = 2
	// handshakeTimeout bounds the wait for a turn: client-go waits as long for the handshake.
	handshakeTimeout = 10 * time.Second
)

// Read implements net.Conn. What a new connection has read is processed in a turn, which ends with the next Read.
// Clients that connect again at once, as after the restart of a server, would otherwise make every step of the process
// wait for some hundred handshakes.
func (c *conn) Read(p []byte) (int, error) {
	if c.reads > handshakeReads {
		return c.Conn.Read(p)
	}
	c.handshake.Swap(nil).Yield()
	n, err := c.Conn.Read(p)
	if c.reads++; c.reads > handshakeReads || err != nil {
		return n, err
	}
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	t, ctx := c.handshakes.NewTurn(ctx, host)
	if err := t.Take(ctx); err != nil {
		return 0, err
	}
	c.handshake.Store(t)
	return n, nil
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.handshake.Swap(nil).Yield()
	return c.Conn.Close()
}
