package wire

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"
)

const (
	// holdBytes bounds what is held back of the server's frames: one TLS record.
	holdBytes = 16 << 10
	// holdFor is how long the beginning of an answer waits for what follows it.
	holdFor = 200 * time.Microsecond
)

// Write takes the server's frames, in whatever pieces they come. What is queued goes before them: the server may be
// about to end a stream.
//
// The server writes an answer's headers, its body and its end one after the other, each by itself. The first two are
// held for a moment, so that an answer is one write and one TLS record.
func (c *Conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queueing++
	for c.writing {
		c.turn.Wait()
	}
	c.queueing--
	given := len(p)
	if c.err == nil && c.between() && len(c.queue)+len(c.begun)+len(p) <= holdBytes {
		if c.gather(p) {
			c.turn.Signal()
			if !c.held {
				c.begin()
			}
			return given, c.err
		}
		p = nil
	}
	if c.begun != nil {
		p = append(slices.Clone(c.begun), p...)
		c.dropBegun()
	}
	written := 0
	for written < len(p) && c.err == nil {
		n := len(p) - written
		if len(c.queue) > 0 {
			if c.between() {
				c.send()
				continue
			}
			n = min(n, c.rest())
		}
		c.observe(p[written : written+n])
		c.out(p[written : written+n])
		written += n
	}
	c.turn.Signal()
	c.begin()
	if c.err != nil {
		return 0, c.err
	}
	return given, nil
}

var begun = sync.Pool{New: func() any { return new([holdBytes]byte) }}

// gather adds p to what the server has begun to write, and queues that once it is whole frames: its own buffer is cut
// every 4 KB. It answers false, with p added, where those may not wait, or be among others.
func (c *Conn) gather(p []byte) bool {
	if c.begun == nil {
		c.begun = begun.Get().(*[holdBytes]byte)[:0]
	}
	c.begun = append(c.begun, p...)
	whole, plain, goesOn := framesOf(c.begun)
	if !plain {
		return false
	}
	if !whole {
		return true
	}
	c.observe(c.begun)
	c.grow(len(c.begun))
	c.queue = append(c.queue, c.begun...)
	c.dropBegun()
	if goesOn {
		c.hold()
	} else {
		c.send()
	}
	return true
}

func (c *Conn) dropBegun() {
	begun.Put((*[holdBytes]byte)(c.begun[:holdBytes]))
	c.begun = nil
}

// framesOf says of what the server has begun to write whether it ends with a frame; whether it may wait at all, and be
// put between other frames (no leave of the server, and no header block that goes on); and whether it is the beginning
// of answers that go on: headers and data, without an end.
func framesOf(p []byte) (whole, plain, goesOn bool) {
	goesOn = true
	for len(p) >= headBytes {
		n := headBytes + int(p[0])<<16 + int(p[1])<<8 + int(p[2])
		kind, flags := p[3], p[4]
		if kind == frameGoAway || n > holdBytes || kind == frameHeaders && flags&flagEndHeaders == 0 {
			return false, false, false
		}
		goesOn = goesOn && flags&flagEndStream == 0 && (kind == frameData || kind == frameHeaders)
		if n > len(p) {
			return false, true, false
		}
		p = p[n:]
	}
	return len(p) == 0, true, goesOn
}

// hold has what is queued written after a moment, unless that happens before.
func (c *Conn) hold() {
	if c.held {
		return
	}
	c.held = true
	if c.release == nil {
		c.release = time.AfterFunc(c.holdFor, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.held = false
			c.begin()
		})
		return
	}
	c.release.Reset(c.holdFor)
}

// between says whether a frame may be put in: the server is amid none, and no header block is open.
func (c *Conn) between() bool { return c.have == 0 && c.payload == 0 && !c.block }

// rest is how many bytes at least belong to the frame that the server is amid.
func (c *Conn) rest() int {
	if c.payload > 0 {
		return c.payload
	}
	return headBytes - c.have
}

// out writes p, with the lock released; others queue meanwhile.
func (c *Conn) out(p []byte) {
	c.writing = true
	c.mu.Unlock()
	var err error
	for len(p) > 0 && err == nil {
		n := min(len(p), piece)
		_ = c.SetWriteDeadline(time.Now().Add(c.patience))
		_, err = c.Conn.Write(p[:n])
		p = p[n:]
	}
	c.mu.Lock()
	c.writing = false
	if err != nil && c.err == nil {
		c.err = err
		_ = c.NetConn().Close() // whoever reads is to know it as well
		c.wake()
	}
}

// send writes what is queued now.
func (c *Conn) send() {
	if c.held {
		c.held = false
		c.release.Stop()
	}
	out := c.queue
	c.queue, c.spare = c.spare[:0], nil
	c.out(out)
	switch {
	case cap(out) == largeBuffer:
		large.Put((*[largeBuffer]byte)(out[:largeBuffer]))
	case cap(out) <= smallBuffer:
		c.spare = out
	}
	c.wake()
}

// observe follows the server's frames.
func (c *Conn) observe(p []byte) {
	for len(p) > 0 {
		if c.payload > 0 {
			n := min(len(p), c.payload)
			c.payload -= n
			p = p[n:]
			continue
		}
		n := copy(c.head[c.have:], p)
		c.have += n
		p = p[n:]
		if c.have < headBytes {
			return
		}
		c.have = 0
		c.payload = int(c.head[0])<<16 | int(c.head[1])<<8 | int(c.head[2])
		c.left(c.head[3], c.head[4], binary.BigEndian.Uint32(c.head[5:])&(1<<31-1), int64(c.payload))
	}
}

// left takes note of one of the server's frames.
func (c *Conn) left(kind, flags byte, id uint32, length int64) {
	switch kind {
	case frameData:
		c.server += length
		c.theirs -= length
		if s := c.streams[id]; s != nil {
			s.window -= length
			s.sent += length
		}
	case frameHeaders, framePush, frameContinuation:
		c.block = flags&flagEndHeaders == 0
		if s := c.streams[id]; s != nil {
			s.headers = !c.block
		}
		if kind != frameHeaders { // their flag of this value is no end of a stream
			return
		}
	case frameReset:
		c.forget(id)
		return
	case frameGoAway: // of streams that come now the server says nothing, so nothing would end them here
		c.leaving = true
		return
	default:
		return
	}
	if flags&flagEndStream != 0 {
		c.forget(id)
		return
	}
	if c.waiting > 0 {
		c.wake()
	}
}

func (c *Conn) forget(id uint32) {
	if s := c.streams[id]; s != nil {
		s.over = true
		delete(c.streams, id)
		c.wake()
	}
}

// wake lets every waiting writer look again.
func (c *Conn) wake() {
	if c.waiting > 0 {
		close(c.room)
		c.room = make(chan struct{})
	}
}
