package wire

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
	window  int64 // how much the client takes of this stream
	sent    int64 // bytes of the body that the server has written
	headers bool  // the answer's headers have been written
	taken   bool
	over    bool
}

var (
	errClosed = errors.New("the connection is closed")
	// ErrOver is what a write finds when the client has ended the stream.
	ErrOver = errors.New("the stream is over")
	// ErrSlow is what a write ends with when the client takes nothing.
	ErrSlow = errors.New("the client takes nothing")
)

type connKey struct{}

type streamKey struct{}

// Context marks what is served over c.
func (c *Conn) Context(ctx context.Context) context.Context {
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
		name := http.CanonicalHeaderKey(c.token)
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

// Of is the stream that req came on; nil where it came over HTTP/1 or cannot be taken.
func Of(req *http.Request) *Stream {
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
	for !s.over && c.err == nil && (!s.headers || s.sent < written) { // the server's buffer still holds some of it
		if c.await(ctx) != nil {
			return false
		}
	}
	if ctx.Err() != nil || s.over || c.err != nil || s.sent != written || c.budget+c.spent < leastBudget {
		return false
	}
	s.taken = true
	return true
}

// await waits for anything to change, with the lock released.
func (c *Conn) await(ctx context.Context) error {
	room := c.room
	c.waiting++
	c.mu.Unlock()
	var err error
	select {
	case <-room:
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.mu.Lock()
	c.waiting--
	return err
}

func (s *Stream) dead() error {
	switch {
	case s.over:
		return ErrOver
	case s.conn.err != nil:
		return s.conn.err
	}
	return nil
}

// Offer queues all of parts, or nothing where there is no room for them now. Then full says whether it is the
// connection's queue that has none, to all of whose streams that happens: come Later. Otherwise it is the client that
// takes no more of this stream: Write. Flush the connection afterwards.
func (s *Stream) Offer(parts ...[]byte) (taken, full bool) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.dead() != nil || int64(n) > min(s.window, c.budget) {
		return false, false
	}
	if len(c.queue)+n > maxQueue && len(c.queue) > 0 {
		return false, true
	}
	s.queue(&parcel{parts: parts}, n)
	return true, false
}

// Later has r come back, once, when the connection's queue has room, after those who came before. A thousand streams
// that wait so wake no goroutine of theirs. Who finds no room all the same comes Later again, last.
func (s *Stream) Later(r Returner) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.later = append(c.later, r)
	c.begin()
}

// Returner is whoever waits for room. Return offers what there is by then. It must not wait for the client: nothing of
// the connection is written meanwhile.
type Returner interface{ Return() }

// Flush writes what is queued for any stream of this one's connection.
func (s *Stream) Flush() { s.conn.Flush() }

// parcel is what is left of some parts.
type parcel struct {
	parts [][]byte
	left  []byte
}

// take appends the next n bytes to dst.
func (p *parcel) take(dst []byte, n int) []byte {
	for n > 0 {
		for len(p.left) == 0 {
			p.left, p.parts = p.parts[0], p.parts[1:]
		}
		k := min(n, len(p.left))
		dst = append(dst, p.left[:k]...)
		p.left = p.left[k:]
		n -= k
	}
	return dst
}

// queue queues the parcel's next n bytes, in frames as long as may be.
func (s *Stream) queue(p *parcel, n int) {
	c := s.conn
	s.window -= int64(n)
	c.budget -= int64(n)
	c.spent += int64(n)
	c.grow(n + (n/c.maxFrame+1)*headBytes)
	for n > 0 {
		k := min(n, c.maxFrame)
		c.queue = append(c.queue, byte(k>>16), byte(k>>8), byte(k), frameData, 0, byte(s.id>>24),
			byte(s.id>>16), byte(s.id>>8), byte(s.id))
		c.queue = p.take(c.queue, k)
		n -= k
	}
}

// Write queues parts and writes them, as fast as the client takes them. It is ErrSlow when the client takes no byte for
// as long as patience.
func (s *Stream) Write(ctx context.Context, patience time.Duration, parts ...[]byte) error {
	left := 0
	for _, p := range parts {
		left += len(p)
	}
	rest := &parcel{parts: parts}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	var last time.Time // since when nothing was taken
	for left > 0 {
		if err := s.dead(); err != nil {
			return err
		}
		n := int(min(int64(left), s.window, c.budget, int64(maxQueue-len(c.queue))))
		// A larger window is waited for rather than many small frames sent (the silly window syndrome).
		least := min(int64(left), leastWrite, c.window/2)
		if n <= 0 || s.window < least {
			if last.IsZero() {
				last = time.Now()
			}
			waiting, cancel := context.WithDeadline(ctx, last.Add(patience))
			err := c.await(waiting)
			cancel()
			if err != nil && ctx.Err() == nil {
				return ErrSlow
			}
			if err != nil {
				return err
			}
			continue
		}
		last = time.Time{}
		s.queue(rest, n)
		left -= n
		c.begin()
	}
	return nil
}

// Finish waits until what was queued has been written, so that the handler may return: the server ends the stream then.
func (s *Stream) Finish(ctx context.Context) error {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) > 0 && s.dead() == nil {
		c.begin()
		if err := c.await(ctx); err != nil {
			return err
		}
	}
	return s.dead()
}
