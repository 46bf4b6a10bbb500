package h2writer

import (
	"encoding/binary"
	"net/http"
	"slices"

	"golang.org/x/net/http2"

	"watershed.dev/platform/recovery"
)

// detachment is the rest of a response whose handler returns before it ends. The connection's lock guards it.
//
//	attached --- Detach ---> detached --- End, and the handler has returned ---> completed.
type detachment struct {
	// onClosed is called when the client or the connection closes the stream.
	onClosed func()
	// atEnd holds the functions of AtEnd.
	atEnd           []func(panicked any)
	ended, returned bool
	completed       bool
	panicked        any
}

// Detach lets the handler of a hijacked stream return before its response ends. The response continues until End, and
// the request's context ends with the handler. onClosed is called, perhaps more than once, when the client or the
// connection closes the stream. It runs with the connection locked, so it must not block or call the Stream. Detach
// returns false and changes nothing if the stream is closed or the client may still send a body.
func (s *Stream) Detach(onClosed func()) bool {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.closedErr() != nil || !s.hijacked || !s.clientEnded {
		return false
	}
	s.detachment = &detachment{onClosed: onClosed}
	c.detached++
	if c.unendedByServer == nil {
		c.unendedByServer = map[uint32]struct{}{}
	}
	c.unendedByServer[s.id] = struct{}{}
	return true
}

// End ends a detached response once its handler has returned. It runs the functions of AtEnd before the client sees the
// end. A response that ends by a panic is reset.
func (s *Stream) End(panicked any) {
	s.complete(func(d *detachment) { d.ended, d.panicked = true, panicked })
}

// AtEnd calls f when the response of req ends: now, unless the stream is detached. It is for a defer statement of a
// handler. panicked is the value of a panic after the handler has returned.
func AtEnd(req *http.Request, f func(panicked any)) {
	if !Detached(req) {
		f(nil)
		return
	}
	s := StreamFrom(req)
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.detachment.atEnd = append(s.detachment.atEnd, f)
}

// Detached reports whether the response of req continues after its handler. Only the handler's goroutine may ask.
func Detached(req *http.Request) bool {
	s := StreamFrom(req)
	return s != nil && s.detachment != nil
}

// complete applies update, and completes the response if it has ended and its handler has returned.
func (s *Stream) complete(update func(*detachment)) {
	c := s.conn
	c.mu.Lock()
	d := s.detachment
	update(d)
	complete, atEnd := d.ended && d.returned && !d.completed, d.atEnd
	if complete {
		d.completed, d.atEnd = true, nil
	}
	c.mu.Unlock()
	if !complete {
		return
	}
	for _, f := range slices.Backward(atEnd) {
		runRecovered(func() { f(d.panicked) }) // the others still have to run
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.closedErr() == nil {
		if d.panicked != nil {
			c.queueReset(s.id, http2.ErrCodeInternal)
		} else {
			c.queueFrame(s.id, frameData, flagEndStream, nil)
		}
		c.removeStream(s.id)
		c.scheduleDrain()
	}
	if c.detached--; c.detached == 0 && c.allEnded != nil {
		close(c.allEnded)
		c.allEnded = nil
	}
}

// runRecovered runs f, and logs its panic.
func runRecovered(f func()) {
	var err error // recovery has logged it
	defer recovery.ToError("the end of a detached response", &err)
	f()
}

// handlerReturned completes a detached response that has ended.
func (s *Stream) handlerReturned() {
	if s.detachment != nil {
		s.complete(func(d *detachment) { d.returned = true })
	}
}

// keepOpen keeps a connection with detached responses open: a single handler waits until all of them have ended.
// The server closes a connection without an open stream when it is idle or shuts down.
func (s *Stream) keepOpen() {
	if s.detachment == nil {
		return
	}
	c := s.conn
	c.mu.Lock()
	wait := c.detached > 0 && c.allEnded == nil
	var allEnded chan struct{}
	if wait {
		allEnded = make(chan struct{})
		c.allEnded = allEnded
	}
	c.mu.Unlock()
	if wait {
		<-allEnded
	}
}

// queueFrame queues a frame without a payload of DATA.
func (c *Conn) queueFrame(id uint32, kind, flags byte, payload []byte) {
	n := len(payload)
	c.grow(frameHeaderBytes + n)
	c.queue = append(c.queue, byte(n>>16), byte(n>>8), byte(n), kind, flags, byte(id>>24), byte(id>>16), byte(id>>8),
		byte(id))
	c.queue = append(c.queue, payload...)
}

func (c *Conn) queueReset(id uint32, code http2.ErrCode) {
	c.queueFrame(id, frameReset, 0, binary.BigEndian.AppendUint32(nil, uint32(code)))
}

// overStreamLimit reports whether a new stream exceeds the connection's limit because of detached streams. The client
// may not have more streams, and the server would end the connection if it counted more. The server does not count
// detached streams that it has closed, and counts streams that have ended here until it closes them.
func (c *Conn) overStreamLimit() bool {
	if c.detached > 0 && len(c.streams) >= c.streamLimit {
		return true
	}
	if len(c.unendedByServer) == 0 || len(c.streams)+len(c.unendedByServer) < c.streamLimit {
		return false
	}
	server := len(c.unendedByServer)
	for _, s := range c.streams {
		if s.detachment == nil {
			server++
		}
	}
	return server >= c.streamLimit
}

// refuseStream refuses a new stream. The server must see its headers, whose compression has a state, so it sees a
// stream that the client resets. Handler ignores a request with the stream ID 0. A client that does not read its
// refusals loses the connection.
func (c *Conn) refuseStream(frame []byte, flags byte, id uint32) []byte {
	// Without END_HEADERS, nothing may follow but the rest of the headers.
	if flags&flagEndHeaders == 0 || flags&flagPadded != 0 || len(c.queue) >= c.queueLimit() {
		c.err = errStreamLimit
		_ = c.NetConn().Close()
		return frame
	}
	c.queueReset(id, http2.ErrCodeRefusedStream)
	c.scheduleDrain()
	frame = c.addStreamHeader(frame, 0)
	frame = append(frame, 0, 0, 4, frameReset, 0, byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
	frame = binary.BigEndian.AppendUint32(frame, uint32(http2.ErrCodeRefusedStream))
	c.scratch = frame[:0]
	return frame
}

// withoutEnds returns p without the frames with which the server ends detached streams, and the rest of p that is an
// incomplete frame header. p starts at the position that observe has reached.
func (c *Conn) withoutEnds(p []byte) (kept, incomplete []byte) {
	i := min(c.payloadLeft, len(p))
	for len(p)-i >= frameHeaderBytes {
		h := p[i : i+frameHeaderBytes]
		n := frameHeaderBytes + int(h[0])<<16 + int(h[1])<<8 + int(h[2])
		id := binary.BigEndian.Uint32(h[5:]) & (1<<31 - 1)
		if _, ok := c.unendedByServer[id]; ok && n == frameHeaderBytes && h[3] == frameData && h[4] == flagEndStream {
			delete(c.unendedByServer, id)
			p = slices.Concat(p[:i], p[i+n:])
			continue
		}
		i = min(i+n, len(p))
	}
	return p[:i], p[i:]
}
