package h2writer

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"
)

const (
	// recordBytes is the size of a TLS record.
	recordBytes = 16 << 10
	// corkBytes limits the server's frames that are held back, to a TLS record.
	corkBytes = recordBytes
	// corkDelay is how long the start of a response waits for the rest.
	corkDelay = 200 * time.Microsecond
)

// Write accepts the server's frames, in pieces of any size. It writes the queue first, because the server may be about
// to end a stream.
//
// The server writes the headers, the body and the end of a response separately. Write holds the first two for
// corkDelay, so that a response is a single write and TLS record.
func (c *Conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.serverWaiting++
	for c.writing {
		c.serverTurn.Wait()
	}
	c.serverWaiting--
	total := len(p)
	if c.err == nil && c.atFrameBoundary() && len(c.queue)+len(c.partial)+len(p) <= corkBytes {
		if c.bufferFrames(p) {
			c.serverTurn.Signal()
			if !c.corked {
				c.scheduleDrain()
			}
			return total, c.err
		}
		p = nil
	}
	if c.partial != nil {
		p = append(slices.Clone(c.partial), p...)
		c.dropPartial()
	}
	p, incomplete := c.withoutEnds(p)
	if len(incomplete) > 0 {
		c.partial = append(partialBuffers.Get().(*[corkBytes]byte)[:0], incomplete...)
	}
	written := 0
	for written < len(p) && c.err == nil {
		n := len(p) - written
		if len(c.queue) > 0 {
			if c.atFrameBoundary() {
				c.flushQueue()
				continue
			}
			n = min(n, c.frameRemainder())
		}
		c.observe(p[written : written+n])
		c.writeOut(p[written : written+n])
		written += n
	}
	c.serverTurn.Signal()
	c.scheduleDrain()
	if c.err != nil {
		return 0, c.err
	}
	return total, nil
}

var partialBuffers = sync.Pool{New: func() any { return new([corkBytes]byte) }}

// bufferFrames adds p to the partial frames and queues them once they are complete: the server's own buffer flushes
// every 4 KB. It returns false, with p added to partial, if the frames must be written directly.
func (c *Conn) bufferFrames(p []byte) bool {
	if c.partial == nil {
		c.partial = partialBuffers.Get().(*[corkBytes]byte)[:0]
	}
	c.partial = append(c.partial, p...)
	complete, bufferable, continues := inspectFrames(c.partial)
	if !bufferable {
		return false
	}
	if !complete {
		return true
	}
	if kept, _ := c.withoutEnds(c.partial); len(kept) < len(c.partial) {
		c.partial = append(c.partial[:0], kept...)
	}
	c.observe(c.partial)
	c.grow(len(c.partial))
	c.queue = append(c.queue, c.partial...)
	c.dropPartial()
	if continues {
		c.cork()
	} else {
		c.flushQueue()
	}
	return true
}

func (c *Conn) dropPartial() {
	partialBuffers.Put((*[corkBytes]byte)(c.partial[:corkBytes]))
	c.partial = nil
}

// inspectFrames classifies frames that the server has written.
//
//   - complete: p ends at a frame boundary.
//   - bufferable: the frames may be delayed and mixed with other frames. GOAWAY, an open header block and frames over
//     corkBytes may not.
//   - continues: the frames start responses that continue, because they are HEADERS and DATA without END_STREAM.
func inspectFrames(p []byte) (complete, bufferable, continues bool) {
	continues = true
	for len(p) >= frameHeaderBytes {
		n := frameHeaderBytes + int(p[0])<<16 + int(p[1])<<8 + int(p[2])
		kind, flags := p[3], p[4]
		if kind == frameGoAway || n > corkBytes || kind == frameHeaders && flags&flagEndHeaders == 0 {
			return false, false, false
		}
		continues = continues && flags&flagEndStream == 0 && (kind == frameData || kind == frameHeaders)
		if n > len(p) {
			return false, true, false
		}
		p = p[n:]
	}
	return len(p) == 0, true, continues
}

// cork schedules a write of the queue after corkDelay, unless it is written before.
func (c *Conn) cork() {
	if c.corked {
		return
	}
	c.corked = true
	if c.corkTimer == nil {
		c.corkTimer = time.AfterFunc(c.corkDelay, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.corked = false
			c.scheduleDrain()
		})
		return
	}
	c.corkTimer.Reset(c.corkDelay)
}

// atFrameBoundary reports whether frames may be inserted: the server's last frame and header block are complete.
func (c *Conn) atFrameBoundary() bool {
	return c.headerRead == 0 && c.payloadLeft == 0 && !c.headerBlock
}

// frameRemainder returns how many bytes belong at least to the server's current frame.
func (c *Conn) frameRemainder() int {
	if c.payloadLeft > 0 {
		return c.payloadLeft
	}
	return frameHeaderBytes - c.headerRead
}

// writeOut writes p to the socket. It releases the lock, so that others can queue meanwhile.
func (c *Conn) writeOut(p []byte) {
	c.writing = true
	c.mu.Unlock()
	var err error
	for len(p) > 0 && err == nil {
		n := min(len(p), writeChunkBytes)
		_ = c.SetWriteDeadline(time.Now().Add(c.writeTimeout))
		err = c.writeChunk(p[:n])
		p = p[n:]
	}
	c.mu.Lock()
	c.writing = false
	if err != nil && c.err == nil {
		c.err = err
		_ = c.NetConn().Close() // so that Read fails too
		c.wake()
	}
}

// writeChunk writes the TLS records of a chunk at once.
func (c *Conn) writeChunk(p []byte) error {
	if c.socket == nil || len(p) <= recordBytes {
		_, err := c.Conn.Write(p)
		return err
	}
	c.socket.Collect()
	_, err := c.Conn.Write(p)
	return errors.Join(err, c.socket.Flush())
}

// flushQueue writes the queue.
func (c *Conn) flushQueue() {
	if c.corked {
		c.corked = false
		c.corkTimer.Stop()
	}
	out, b := c.queue, c.buffer
	c.queue, c.buffer = nil, nil
	c.writeOut(out)
	c.release(b)
	c.wake()
}

// observe parses the server's frames.
func (c *Conn) observe(p []byte) {
	for len(p) > 0 {
		if c.payloadLeft > 0 {
			n := min(len(p), c.payloadLeft)
			c.payloadLeft -= n
			p = p[n:]
			continue
		}
		n := copy(c.header[c.headerRead:], p)
		c.headerRead += n
		p = p[n:]
		if c.headerRead < frameHeaderBytes {
			return
		}
		c.headerRead = 0
		c.payloadLeft = int(c.header[0])<<16 | int(c.header[1])<<8 | int(c.header[2])
		c.sentFrame(c.header[3], c.header[4], binary.BigEndian.Uint32(c.header[5:])&(1<<31-1), int64(c.payloadLeft))
	}
}

// sentFrame processes a frame of the server.
func (c *Conn) sentFrame(kind, flags byte, id uint32, length int64) {
	switch kind {
	case frameData:
		c.serverUsed += length
		c.serverWindow -= length
		if s := c.streams[id]; s != nil {
			s.window -= length
			s.sent += length
		}
	case frameHeaders, framePush, frameContinuation:
		c.headerBlock = flags&flagEndHeaders == 0
		if s := c.streams[id]; s != nil {
			s.headersSent = !c.headerBlock
		}
		if kind != frameHeaders { // this flag's value means END_STREAM only in HEADERS
			flags = 0
		}
	case frameReset:
		delete(c.unendedByServer, id)
		c.removeStream(id)
		return
	case frameGoAway: // the server ignores later streams, so nothing would remove them here
		c.goAwaySent = true
		return
	default:
		return
	}
	if flags&flagEndStream != 0 {
		c.removeStream(id)
		return
	}
	if c.writersWaiting > 0 {
		c.wake()
	}
}

func (c *Conn) removeStream(id uint32) {
	if s := c.streams[id]; s != nil {
		s.closed = true
		delete(c.streams, id)
		s.notifyClosed()
		c.wake()
	}
}

// notifyClosed notifies the writer of a detached response that has not ended.
func (s *Stream) notifyClosed() {
	if d := s.detachment; d != nil && !d.ended {
		d.onClosed()
	}
}

// wake makes all waiting writers check again.
func (c *Conn) wake() {
	if c.writersWaiting > 0 {
		close(c.changed)
		c.changed = make(chan struct{})
	}
}
