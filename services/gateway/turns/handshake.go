package turns

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"watershed.dev/platform/identity"
)

// maxHandshakeWait bounds the wait of a handshake for its turn. The handshake then continues without a turn, because
// many clients may have the same address, and client-go waits 10 s for a handshake. If the bound is short, thousands of
// handshakes continue at once.
const maxHandshakeWait = 8 * time.Second

// Handshakes returns a tls.Config's GetConfigForClient that lets each handshake take a turn before it computes the
// server's messages, and then calls next. The turn ends with the next read of the connection. Its owner is the client's
// address. Connections of other listeners than NewListener's take no turn.
//
// After the restart of a server, some hundred clients connect at once. Without turns, each step of the process would
// wait for all of their handshakes.
func (s *Turns) Handshakes(
	next func(*tls.ClientHelloInfo) (*tls.Config, error),
) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	return func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if c, ok := hello.Conn.(*conn); ok {
			ctx, cancel := context.WithTimeout(hello.Context(), s.maxWait)
			defer cancel()
			t, ctx := s.NewTurn(ctx, identity.Host(c.RemoteAddr().String()))
			c.endWait.Store(&cancel)
			if c.closed.Load() {
				return nil, net.ErrClosed
			}
			if t.Take(ctx) == nil {
				c.handshake.Store(t)
			}
			c.endWait.Store(nil)
			if c.closed.Load() { // by the limit of connections, for example: the handshake would be useless work
				c.endHandshake()
				return nil, net.ErrClosed
			}
		}
		return next(hello)
	}
}

// Read implements net.Conn. It ends the turn of the handshake, which then waits for the client.
func (c *conn) Read(p []byte) (int, error) {
	c.endHandshake()
	return c.Conn.Read(p)
}

// Close implements net.Conn. It ends the wait of the handshake for its turn.
func (c *conn) Close() error {
	c.closed.Store(true)
	if end := c.endWait.Load(); end != nil {
		(*end)()
	}
	c.endHandshake()
	return c.Conn.Close()
}

func (c *conn) endHandshake() {
	if c.handshake.Load() != nil {
		c.handshake.Swap(nil).Yield()
	}
}
