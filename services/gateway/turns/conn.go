package turns

import (
	"context"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
)

// listener accepts connections that end turns when a write blocks.
type listener struct{ net.Listener }

// NewListener wraps l. If a write to an accepted connection blocks, the turns of its responses end. WithConn adds the
// connection to the context of requests.
func NewListener(l net.Listener) net.Listener { return listener{l} }

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	socket, ok := c.(syscall.Conn)
	if !ok {
		return c, nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return c, nil
	}
	accepted := &conn{Conn: c, raw: raw}
	accepted.writeFunc = accepted.writePending
	return accepted, nil
}

// conn detects writes that block, and can collect the bytes of several writes. Package net does not report EAGAIN, so
// conn writes to the socket itself. Nil is a connection that does not block.
type conn struct {
	net.Conn
	raw syscall.RawConn

	writing    sync.Mutex
	collecting bool
	// collected are the bytes for Flush; nil if there are none.
	collected *[]byte
	// pending is the rest of the write in progress, and err its error.
	pending []byte
	err     error
	// writeFunc is writePending, allocated once.
	writeFunc func(fd uintptr) (done bool)

	// handshake is the turn of the TLS handshake, from its grant until the next read. endWait ends the wait for it.
	handshake atomic.Pointer[Turn]
	endWait   atomic.Pointer[context.CancelFunc]
	closed    atomic.Bool

	// mu may be locked while Turns.mu is.
	mu sync.Mutex
	// blocked is set while a write waits for the socket.
	blocked bool
	// turns are the held turns of the connection's responses.
	turns []*Turn
}

// Collect lets the next calls of Write add their bytes to the bytes that Flush writes. A TLS connection writes each
// record of 16 KB by itself otherwise: a system call each, which mostly wakes a thread of the client.
func (c *conn) Collect() {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.collecting = true
}

// collectBuffers are buffers of 64 KB in four TLS records, with their headers and tags.
var collectBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 66<<10); return &b }}

// Flush writes the collected bytes, and ends their collection.
func (c *conn) Flush() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.collecting = false
	b := c.collected
	if c.collected = nil; b == nil {
		return nil
	}
	_, err := c.write(*b)
	*b = (*b)[:0]
	collectBuffers.Put(b)
	return err
}

// Write implements net.Conn. After Collect, Flush returns the error of the write.
func (c *conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if !c.collecting {
		return c.write(p)
	}
	if c.collected == nil {
		c.collected = collectBuffers.Get().(*[]byte)
	}
	*c.collected = append(*c.collected, p...)
	return len(p), nil
}

// write writes p to the socket.
func (c *conn) write(p []byte) (int, error) {
	c.pending, c.err = p, nil
	err := c.raw.Write(c.writeFunc)
	if err == nil {
		err = c.err
	} else { // the wait for the socket has failed
		c.unblock()
	}
	n := len(p) - len(c.pending)
	c.pending = nil
	return n, err
}

// writePending writes until the socket accepts no more. It returns false if the write must wait.
func (c *conn) writePending(fd uintptr) (done bool) {
	c.unblock()
	for len(c.pending) > 0 {
		n, err := syscall.Write(int(fd), c.pending)
		switch err {
		case nil:
			c.pending = c.pending[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			c.block()
			return false
		default:
			c.err = &net.OpError{Op: "write", Net: c.LocalAddr().Network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(),
				Err: os.NewSyscallError("write", err)}
			return true
		}
	}
	return true
}

// block ends the turns of the connection's responses, which get no turn until unblock.
func (c *conn) block() {
	c.mu.Lock()
	c.blocked = true
	held := slices.Clone(c.turns)
	c.mu.Unlock()
	for _, t := range held {
		t.Yield()
	}
}

func (c *conn) unblock() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blocked = false
}

// add adds a held turn. It returns false if the connection is blocked.
func (c *conn) add(t *Turn) bool {
	if c == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.blocked {
		c.turns = append(c.turns, t)
	}
	return !c.blocked
}

// remove removes a turn that has ended.
func (c *conn) remove(t *Turn) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.turns, t); i >= 0 {
		c.turns = slices.Delete(c.turns, i, i+1)
	}
}

type connKey struct{}

// WithConn adds c to ctx. NewListener's listener has accepted c or, if c is a *tls.Conn, the connection below it.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	if c, ok := c.(*conn); ok {
		ctx = context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}
