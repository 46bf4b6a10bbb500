package h2writer

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"watershed.dev/services/gateway/turns"
)

// Stream is a request's stream.
//
//	server's --- Hijack ---> hijacked.
//	hijacked --- Detach ---> detached.
//	server's, hijacked or detached --- END_STREAM, RST_STREAM ---> closed.
//
// The server writes the body until a handler hijacks the stream. Then TryWrite and Write do, and the server writes only
// END_STREAM, when the handler returns. If the stream is detached, End does.
type Stream struct {
	conn *Conn
	id   uint32

	// The connection's lock guards all fields below.
	window      int64 // how much the client accepts
	sent        int64 // bytes of the body that the server has written
	written     int64 // bytes of the body that TryWrite and Write have queued
	headersSent bool  // the response's headers have been written
	claimed     bool  // a request has it
	hijacked    bool
	closed      bool
	clientEnded bool        // the request has no body
	detachment  *detachment // set by the handler's goroutine, which needs no lock to see it
}

var (
	errConnClosed  = errors.New("the connection is closed")
	errStreamLimit = errors.New("the client exceeds the limit on streams")
	// errStreamClosed is returned by writes after the stream was closed.
	errStreamClosed = errors.New("the stream is closed")
	// ErrSlowClient is returned by writes if the client accepts no data for the timeout.
	ErrSlowClient = errors.New("the client accepts no data")
)

type connKey struct{}

type streamKey struct{}

// WithConn adds c to the context of the requests that c serves.
func (c *Conn) WithConn(ctx context.Context) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Handler adds the Stream of each request to its context, for StreamFrom.
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
		if err == nil && id == 0 { // refused
			return
		}
		if err == nil {
			if s := c.claim(uint32(id)); s != nil {
				req = req.WithContext(context.WithValue(req.Context(), streamKey{}, s))
				func() {
					defer s.handlerReturned() // also after a panic
					next.ServeHTTP(w, req)
				}()
				s.keepOpen()
				return
			}
		}
		next.ServeHTTP(w, req)
	})
}

// claim returns the stream with an id once, and then nil. A client may end a header block in an incomplete literal,
// which takes in the stream header. Its next request could then name another stream.
func (c *Conn) claim(id uint32) *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[id]
	if s == nil || s.claimed {
		return nil
	}
	s.claimed = true
	return s
}

// StreamFrom returns the stream of req. It is nil over HTTP/1, or if the stream is not tracked.
func StreamFrom(req *http.Request) *Stream {
	s, _ := req.Context().Value(streamKey{}).(*Stream)
	return s
}

// Hijack gives the rest of the body to the caller, which writes it with TryWrite and Write only. The handler must have
// flushed its own output, which is `written` bytes, and must not return before its last call here. Hijack returns false
// and changes nothing if the client's window is too small to divide.
func (s *Stream) Hijack(ctx context.Context, written int64) bool {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for !s.closed && c.err == nil && (!s.headersSent || s.sent < written) { // the server has buffered it
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

// await waits for the next wake, with the lock released.
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
		return errStreamClosed
	case s.conn.err != nil:
		return s.conn.err
	}
	return nil
}

// TryWrite queues all parts or none. If none, queueFull reports whether the connection's queue is full, which concerns
// all its streams: call EnqueueWaiter. Otherwise the client's window for this stream is full, or the parts are longer
// than a queue: call Write. Call Flush after TryWrite.
func (s *Stream) TryWrite(parts ...[]byte) (accepted, queueFull bool) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	limit := c.queueLimit()
	if s.closedErr() != nil || int64(n) > min(s.window, c.sendWindow, int64(limit)) {
		return false, false
	}
	if len(c.queue)+n > limit {
		return false, true
	}
	s.enqueue(&partReader{parts: parts}, n)
	return true, false
}

// Written returns the number of bytes that TryWrite and Write have queued.
func (s *Stream) Written() int64 {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	return s.written
}

// EnqueueWaiter calls r.Unblock once, when the connection's queue has space, in FIFO order. A thousand waiting streams
// thus wake no goroutine of their own. A waiter that finds no space again calls EnqueueWaiter again and goes last.
func (s *Stream) EnqueueWaiter(r Waiter) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters = append(c.waiters, r)
	c.scheduleDrain()
}

// Waiter waits for space. Unblock queues its pending data. It must not wait for the client, because the connection
// writes nothing meanwhile.
type Waiter interface{ Unblock() }

// Flush writes the queue of the stream's connection.
func (s *Stream) Flush() { s.conn.Flush() }

// partReader holds the unread rest of some parts.
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

// enqueue queues the next n bytes of p, in the longest frames that the client accepts.
func (s *Stream) enqueue(p *partReader, n int) {
	c := s.conn
	s.window -= int64(n)
	s.written += int64(n)
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

// Write queues parts at the pace of the client and starts to write them. It returns ErrSlowClient if the client accepts
// no byte for writeTimeout. While the client's window is full, ctx's response has no turn.
func (s *Stream) Write(ctx context.Context, writeTimeout time.Duration, parts ...[]byte) error {
	remaining := 0
	for _, p := range parts {
		remaining += len(p)
	}
	rest := &partReader{parts: parts}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	var blockedSince time.Time // since when nothing was queued
	yielded := false           // since then
	for remaining > 0 {
		if err := s.closedErr(); err != nil {
			return err
		}
		n := int(min(int64(remaining), s.window, c.sendWindow, int64(c.queueLimit()-len(c.queue))))
		// Wait for a larger window instead of sending many small frames (the silly window syndrome).
		minWindow := min(int64(remaining), minWriteWindow, c.initialWindow/2)
		if n <= 0 || s.window < minWindow {
			if blockedSince.IsZero() {
				blockedSince = time.Now()
			}
			if window := min(s.window, c.sendWindow); !yielded && (window <= 0 || window < minWindow) {
				yielded = true
				turns.Yield(ctx)
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
		blockedSince, yielded = time.Time{}, false
		s.enqueue(rest, n)
		remaining -= n
		c.scheduleDrain()
	}
	return nil
}

// Finish waits until the queue has been written. The handler may then return, and the server ends the stream.
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
