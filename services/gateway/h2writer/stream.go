package h2writer

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

// Stream is one request's. It is the server's until it is taken.
type Stream struct {
	conn *Conn
	id   uint32

	// All below is guarded by the connection's lock.
	window      int64 // how much the client takes of this stream
	sent        int64 // bytes of the body that the server has written
	headersSent bool  // the answer's headers have been written
	hijacked    bool
	closed      bool
}

var (
	errConnClosed = errors.New("the connection is closed")
	// ErrStreamClosed is what a write finds when the client has ended the stream.
	ErrStreamClosed = errors.New("the stream is over")
	// ErrSlowClient is what a write ends with when the client takes nothing.
	ErrSlowClient = errors.New("the client takes nothing")
)

type connKey struct{}

type streamKey struct{}

// WithConn marks what is served over c.
func (c *Conn) WithConn(ctx context.Context) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Handler gives next requests that Of knows the streams of.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		c, ok := req.Context().Value(connKey{}).(*Conn)
		if !ok {
			next.ServeHTTP(w, req)
			return
		}
		name := http.CanonicalHeaderKey(c.streamHeader)
		id, err := strconv.ParseUint(req.Header.Get(name), 10, 31)
		delete(req.Header, name)
		if err == nil {
			c.mu.Lock()
			s := c.streams[uint32(id)]
			c.mu.Unlock()
			if s != nil {
				req = req.WithContext(context.WithValue(req.Context(), streamKey{}, s))
			}
		}
		next.ServeHTTP(w, req)
	})
}

// StreamFrom is the stream that req came on; nil where it came over HTTP/1 or cannot be taken.
func StreamFrom(req *http.Request) *Stream {
	s, _ := req.Context().Value(streamKey{}).(*Stream)
	return s
}

// Hijack makes the rest of the body the caller's to write, with Offer and Write alone. The handler must have flushed
// what it has written, which is written bytes, and must not return before it has made its last call here. It answers
// false where the client's window is too small to be shared; then nothing has changed.
func (s *Stream) Hijack(ctx context.Context, written int64) bool {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for !s.closed && c.err == nil && (!s.headersSent || s.sent < written) { // the server buffers the rest
		if c.await(ctx) != nil {
			return false
		}
	}
	if ctx.Err() != nil || s.closed || c.err != nil || s.sent != written || c.sendWindow+c.sendUsed < minSendWindow {
		return false
	}
	s.hijacked = true
	return true
}

// await waits for anything to change, with the lock released.
func (c *Conn) await(ctx context.Context) error {
	changed := c.changed
	c.writersWaiting++
	c.mu.Unlock()
	var err error
	select {
	case <-changed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.mu.Lock()
	c.writersWaiting--
	return err
}

func (s *Stream) closedErr() error {
	switch {
	case s.closed:
		return ErrStreamClosed
	case s.conn.err != nil:
		return s.conn.err
	}
	return nil
}

// TryWrite queues all of parts, or nothing where there is no room for them now. Then full says whether it is the
// connection's queue that has none, to all of whose streams that happens: come Later. Otherwise it is the client that
// takes no more of this stream: Write. Flush the connection afterwards.
func (s *Stream) TryWrite(parts ...[]byte) (accepted, queueFull bool) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.closedErr() != nil || int64(n) > min(s.window, c.sendWindow) {
		return false, false
	}
	if len(c.queue)+n > maxQueueBytes && len(c.queue) > 0 {
		return false, true
	}
	s.enqueue(&partReader{parts: parts}, n)
	return true, false
}

// EnqueueWaiter has r come back, once, when the connection's queue has room, after those who came before. A thousand streams
// that wait so wake no goroutine of theirs. Who finds no room all the same comes Later again, last.
func (s *Stream) EnqueueWaiter(r Waiter) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters = append(c.waiters, r)
	c.scheduleDrain()
}

// Waiter is whoever waits for room. Return offers what there is by then. It must not wait for the client: nothing of
// the connection is written meanwhile.
type Waiter interface{ Unblock() }

// Flush writes what is queued for any stream of this one's connection.
func (s *Stream) Flush() { s.conn.Flush() }

// partReader is what is left of some parts.
type partReader struct {
	parts [][]byte
	rest  []byte
}

// appendNext appends the next n bytes to dst.
func (p *partReader) appendNext(dst []byte, n int) []byte {
	for n > 0 {
		for len(p.rest) == 0 {
			p.rest, p.parts = p.parts[0], p.parts[1:]
		}
		k := min(n, len(p.rest))
		dst = append(dst, p.rest[:k]...)
		p.rest = p.rest[k:]
		n -= k
	}
	return dst
}

// enqueue queues the parcel's next n bytes, in frames as long as may be.
func (s *Stream) enqueue(p *partReader, n int) {
	c := s.conn
	s.window -= int64(n)
	c.sendWindow -= int64(n)
	c.sendUsed += int64(n)
	c.grow(n + (n/c.maxFrame+1)*frameHeaderBytes)
	for n > 0 {
		k := min(n, c.maxFrame)
		c.queue = append(c.queue, byte(k>>16), byte(k>>8), byte(k), frameData, 0, byte(s.id>>24),
			byte(s.id>>16), byte(s.id>>8), byte(s.id))
		c.queue = p.appendNext(c.queue, k)
		n -= k
	}
}

// Write queues parts and writes them, as fast as the client takes them. It is ErrSlowClient when the client takes no byte for
// as long as patience.
func (s *Stream) Write(ctx context.Context, writeTimeout time.Duration, parts ...[]byte) error {
	remaining := 0
	for _, p := range parts {
		remaining += len(p)
	}
	rest := &partReader{parts: parts}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	var blockedSince time.Time // since when nothing was taken
	for remaining > 0 {
		if err := s.closedErr(); err != nil {
			return err
		}
		n := int(min(int64(remaining), s.window, c.sendWindow, int64(maxQueueBytes-len(c.queue))))
		// A larger window is waited for rather than many small frames sent (the silly window syndrome).
		minWindow := min(int64(remaining), minWriteWindow, c.initialWindow/2)
		if n <= 0 || s.window < minWindow {
			if blockedSince.IsZero() {
				blockedSince = time.Now()
			}
			waitCtx, cancel := context.WithDeadline(ctx, blockedSince.Add(writeTimeout))
			err := c.await(waitCtx)
			cancel()
			if err != nil && ctx.Err() == nil {
				return ErrSlowClient
			}
			if err != nil {
				return err
			}
			continue
		}
		blockedSince = time.Time{}
		s.enqueue(rest, n)
		remaining -= n
		c.scheduleDrain()
	}
	return nil
}

// Finish waits until what was queued has been written, so that the handler may return: the server ends the stream then.
func (s *Stream) Finish(ctx context.Context) error {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) > 0 && s.closedErr() == nil {
		c.scheduleDrain()
		if err := c.await(ctx); err != nil {
			return err
		}
	}
	return s.closedErr()
}
