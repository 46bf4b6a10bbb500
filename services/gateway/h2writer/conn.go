// Package h2writer writes many long-lived responses of an HTTP/2 connection together, from the goroutine that has the
// data. It does not implement HTTP/2: golang.org/x/net/http2 does.
//
// Go's HTTP/2 server writes each flush of each response separately. The handler's goroutine passes a frame to the
// connection's goroutine and waits, and mostly each frame is a TLS record and a system call. This is most of the work
// of a gateway that delivers one event to a thousand watchers.
//
// A Conn sits between the TLS connection and the server. The server still handles settings, headers, priorities,
// errors, and the start and end of every response. A handler may hijack its stream. From then on the Conn writes the
// body as DATA frames between the server's own frames. It writes all pending frames at once and needs no goroutine per
// stream. A handler may also detach its stream and return: the Conn then drops the server's END_STREAM, and writes its
// own when the response ends.
//
// Flow control stays correct because the Conn sees every frame. It counts the window of a hijacked stream itself and
// hides WINDOW_UPDATE frames for that stream from the server. It withholds a part of the connection's window from the
// server, out of what the client adds to the first 65,535 bytes. Only hijacked streams spend that part, and the
// client's updates refill it.
//
// Goroutines: the server's reading goroutine calls Read, its writing goroutine calls Write. drain runs on a goroutine
// that ends with the queue. Any goroutine may call the methods of a Stream.
//
// Review notes:
//
//   - Nothing may be inserted inside a frame or between the frames of a header block: atFrameBoundary guards every
//     insertion.
//   - The window sent to the server plus the window withheld must never exceed the client's.
//   - Waiter.Unblock runs without the lock and must not wait for a client: the connection writes nothing meanwhile.
package h2writer

import (
	"bufio"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

// Frame types and flags (RFC 9113, section 6), as the bytes in a frame header.
const (
	frameData         = byte(http2.FrameData)
	frameHeaders      = byte(http2.FrameHeaders)
	frameReset        = byte(http2.FrameRSTStream)
	frameSettings     = byte(http2.FrameSettings)
	framePush         = byte(http2.FramePushPromise)
	frameGoAway       = byte(http2.FrameGoAway)
	frameWindowUpdate = byte(http2.FrameWindowUpdate)
	frameContinuation = byte(http2.FrameContinuation)

	flagEndStream  = byte(http2.FlagDataEndStream) // also of HEADERS
	flagAck        = byte(http2.FlagSettingsAck)
	flagEndHeaders = byte(http2.FlagHeadersEndHeaders) // also of CONTINUATION and PUSH_PROMISE
	flagPadded     = byte(http2.FlagHeadersPadded)

	settingInitialWindow = http2.SettingInitialWindowSize
	settingMaxFrame      = http2.SettingMaxFrameSize

	frameHeaderBytes = 9
	defaultWindow    = 65535
	prefaceBytes     = len(http2.ClientPreface)
)

const (
	// minSendWindow is how much of the connection's window must be withheld before a stream may be hijacked. Go's
	// client opens with 1 GB and curl with 32 MB. Clients with the protocol's 64 KB are served by the server only.
	minSendWindow = 256 << 10
	// maxQueueBytes limits the bytes that wait for a connection's socket. Writers wait while the queue is full. A user
	// may have thousands of connections, and not read from any of them. So the limit is minQueueBytes while the buffers
	// of all connections take more than maxBufferedBytes, and the buffers of the owner more than maxOwnBufferedBytes.
	maxQueueBytes       = 1 << 20
	minQueueBytes       = recordBytes - 2*frameHeaderBytes // with frame headers, a buffer and a TLS record
	maxBufferedBytes    = 256 << 20
	maxOwnBufferedBytes = 16 << 20
	// minWriteWindow is how much of a stream's window must be open before Write continues a long write.
	minWriteWindow = 64 << 10
	// writeChunkBytes is how much is written to the socket at once. writeTimeout applies to each chunk.
	writeChunkBytes = 64 << 10
	// maxStreams is the maximum number of streams that a Conn tracks. The server's limit on open streams is much lower.
	maxStreams = 4096
	// maxBufferedFrame is the maximum length of a frame that is read as a whole. Longer frames pass through.
	maxBufferedFrame = 64 << 10
)

// collector is a connection whose Flush writes the bytes of all calls of Write since Collect.
type collector interface {
	Collect()
	Flush() error
}

// Conn is an HTTP/2 connection, between TLS and the server. Pass it to http2.Server.ServeConn. mu guards all fields but
// the reading side's.
type Conn struct {
	*tls.Conn
	// socket is the connection below TLS; nil if it is no collector.
	socket collector
	// writeTimeout is how long the socket may accept no byte before the connection is closed.
	writeTimeout time.Duration
	// streamHeader is the request header with the stream's id, because the server does not expose it to handlers. Its
	// name is random, so that no client can guess it.
	streamHeader string

	// Only the server's reading goroutine uses the reading side.
	in      *bufio.Reader
	ready   []byte
	raw     int
	scratch []byte

	mu           sync.Mutex
	streams      map[uint32]*Stream
	lastStreamID uint32 // of the newest stream
	streamLimit  int    // the limit on open streams that the server gives to the client
	detached     int    // streams whose detached responses have not completed
	// unendedByServer holds the detached streams that the server has not ended yet.
	unendedByServer map[uint32]struct{}
	allEnded        chan struct{} // closed when detached becomes 0, if a handler waits for that
	goAwaySent      bool          // the server has sent GOAWAY
	initialWindow   int64         // of a new stream
	maxFrame        int
	sendWindow      int64 // the window left for hijacked streams
	sendUsed        int64 // spent by hijacked streams and not yet returned
	serverUsed      int64 // spent by the server and not yet returned
	serverWindow    int64 // the connection's window as the server counts it
	header          [frameHeaderBytes]byte
	headerRead      int  // bytes of header
	payloadLeft     int  // of the server's current frame
	headerBlock     bool // a header block continues in the next frame, so nothing may be inserted
	queue           []byte
	buffer          *buffer      // of queue
	owner           *bufferOwner // nil: the buffers count for no owner
	bufferedBytes   int64        // size of the buffers that the queue and the write use
	closed          bool         // Close was called
	writing         bool
	draining        bool
	err             error
	serverTurn      sync.Cond     // signaled when a write of the server may start
	serverWaiting   int           // writes of the server that wait
	changed         chan struct{} // closed when waiting writers should check again
	writersWaiting  int
	waiters         []Waiter // wait for space in the queue
	// partial holds incomplete frames that the server has written. observe has not processed them.
	partial []byte
	// corked: the queue ends with the start of a response. corkTimer schedules its write.
	corked    bool
	corkDelay time.Duration
	corkTimer *time.Timer
}

// NewConn returns a Conn on c, whose handshake is complete and has negotiated h2. If the client's side accepts no byte
// for writeTimeout, the connection is closed. streamLimit is the server's limit on the open streams of a connection.
func NewConn(c *tls.Conn, writeTimeout time.Duration, streamLimit int) *Conn {
	conn := &Conn{
		Conn:          c,
		writeTimeout:  writeTimeout,
		streamLimit:   streamLimit,
		serverWindow:  defaultWindow,
		streamHeader:  "x-stream-" + strings.ToLower(rand.Text()),
		in:            bufio.NewReaderSize(c, 8<<10),
		raw:           prefaceBytes,
		streams:       map[uint32]*Stream{},
		initialWindow: defaultWindow,
		maxFrame:      16384,
		changed:       make(chan struct{}),
		corkDelay:     corkDelay,
	}
	conn.serverTurn.L = &conn.mu
	conn.socket, _ = c.NetConn().(collector)
	return conn
}

// Read returns the client's frames to the server, without the frames that concern only hijacked streams.
func (c *Conn) Read(p []byte) (int, error) {
	for len(c.ready) == 0 && c.raw == 0 {
		if err := c.readFrame(); err != nil {
			return 0, err
		}
	}
	if len(c.ready) > 0 {
		n := copy(p, c.ready)
		c.ready = c.ready[n:]
		return n, nil
	}
	n, err := c.in.Read(p[:min(len(p), c.raw)])
	c.raw -= n
	return n, err
}

// readFrame reads a frame's header, and the whole frame if its type is tracked.
func (c *Conn) readFrame() error {
	header, err := c.in.Peek(frameHeaderBytes)
	if err != nil {
		if len(header) > 0 { // the server should receive the partial header
			c.raw = len(header)
			return nil
		}
		return err
	}
	length := int(header[0])<<16 | int(header[1])<<8 | int(header[2])
	kind, flags, id := header[3], header[4], binary.BigEndian.Uint32(header[5:])&(1<<31-1)
	tracked := kind == frameHeaders || kind == frameReset || kind == frameSettings || kind == frameWindowUpdate
	if !tracked || length > maxBufferedFrame {
		c.raw = frameHeaderBytes + length
		return nil
	}
	if cap(c.scratch) < frameHeaderBytes+length {
		c.scratch = make([]byte, 0, frameHeaderBytes+length+128)
	}
	frame := c.scratch[:frameHeaderBytes+length]
	if _, err := io.ReadFull(c.in, frame); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = c.receivedFrame(frame, kind, flags, id)
	return nil
}

// receivedFrame processes a client's frame and returns the part that the server should see.
func (c *Conn) receivedFrame(frame []byte, kind, flags byte, id uint32) []byte {
	body := frame[frameHeaderBytes:]
	switch kind {
	case frameHeaders:
		if id <= c.lastStreamID { // trailers, or a frame that the server rejects
			return frame
		}
		c.lastStreamID = id
		if c.overStreamLimit() {
			return c.refuseStream(frame, flags, id)
		}
		if c.goAwaySent || len(c.streams) >= maxStreams { // untracked: the server ignores, refuses or serves it
			return frame
		}
		s := &Stream{conn: c, id: id, window: c.initialWindow, clientEnded: flags&flagEndStream != 0}
		c.streams[id] = s
		if flags&flagEndHeaders == 0 || flags&flagPadded != 0 {
			return frame
		}
		return c.addStreamHeader(frame, id)
	case frameReset:
		c.removeStream(id)
		if _, unended := c.unendedByServer[id]; unended {
			return nil // otherwise the server would not end the stream, and its end could be any later
		}
	case frameSettings:
		if flags&flagAck == 0 {
			c.updateSettings(body)
		}
	case frameWindowUpdate:
		if len(body) != 4 {
			return frame
		}
		n := int64(binary.BigEndian.Uint32(body) & (1<<31 - 1))
		if n == 0 {
			return frame // a protocol error, which the server reports
		}
		if id == 0 {
			return c.distributeWindow(frame, n)
		}
		if s := c.streams[id]; s != nil {
			s.window += n
			if s.hijacked {
				c.wake()
				return nil
			}
		}
	}
	return frame
}

// addStreamHeader adds the header with the stream's id to a request. It is a literal without indexing (RFC 7541,
// section 6.2.2), so the compression state does not change.
func (c *Conn) addStreamHeader(frame []byte, id uint32) []byte {
	value := strconv.FormatUint(uint64(id), 10)
	frame = append(frame, 0, byte(len(c.streamHeader)))
	frame = append(frame, c.streamHeader...)
	frame = append(frame, byte(len(value)))
	frame = append(frame, value...)
	length := len(frame) - frameHeaderBytes
	frame[0], frame[1], frame[2] = byte(length>>16), byte(length>>8), byte(length)
	c.scratch = frame[:0]
	return frame
}

func (c *Conn) updateSettings(body []byte) {
	window := c.initialWindow
	for ; len(body) >= 6; body = body[6:] {
		v := binary.BigEndian.Uint32(body[2:])
		switch http2.SettingID(binary.BigEndian.Uint16(body)) {
		case settingInitialWindow:
			window = int64(v)
		case settingMaxFrame:
			if v >= 16384 {
				c.maxFrame = int(min(v, 64<<10))
			}
		}
	}
	if change := window - c.initialWindow; change != 0 { // a repeated setting counts only as its last value
		c.initialWindow = window
		for _, s := range c.streams {
			s.window += change
		}
	}
	c.wake()
}

// distributeWindow divides an increment of the connection's window. It first returns the bytes that hijacked streams
// spent, then the bytes that the server spent. Each side gets half of the rest.
func (c *Conn) distributeWindow(frame []byte, n int64) []byte {
	// streams that the client does not read must not starve the server
	if c.serverWindow < defaultWindow && c.sendWindow > minSendWindow {
		c.sendUsed -= min(n, c.sendUsed)
		c.serverWindow += n
		return frame
	}
	returned := min(n, c.sendUsed)
	c.sendUsed -= returned
	c.sendWindow += returned
	n -= returned
	serverShare := min(n, c.serverUsed)
	c.serverUsed -= serverShare
	added := n - serverShare
	c.sendWindow += added / 2
	serverShare += added - added/2
	c.serverWindow += serverShare
	c.wake()
	if serverShare == 0 {
		return nil
	}
	binary.BigEndian.PutUint32(frame[frameHeaderBytes:], uint32(serverShare))
	return frame
}

// Close closes the connection.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.err == nil {
		c.err = errConnClosed
	}
	for _, s := range c.streams {
		s.notifyClosed()
	}
	c.dropQueue()
	if !c.closed {
		c.closed = true
		c.owner.leave()
	}
	c.wake()
	writing := c.writing
	c.mu.Unlock()
	if writing { // tls.Conn.Close would wait up to 5 s for a blocked Flush of socket
		return c.NetConn().Close()
	}
	return c.Conn.Close()
}

// Flush starts to write the queue and does not wait for it.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.scheduleDrain()
}

// scheduleDrain starts drain if the queue or waiters are pending and no other goroutine writes. The lock is held.
func (c *Conn) scheduleDrain() {
	if (len(c.queue) > 0 || len(c.waiters) > 0) && !c.draining && !c.writing && c.err == nil {
		c.draining = true
		go c.drain()
	}
}

// drain writes the queue until it is empty, and unblocks the waiters. The server's own frames go first: its Write
// includes the queue.
func (c *Conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.atFrameBoundary() && !c.writing && c.serverWaiting == 0 && c.err == nil {
		c.unblockWaiters()
		if len(c.queue) == 0 {
			if len(c.waiters) == 0 {
				break
			}
			continue // the server has written the queue meanwhile, so there is space again
		}
		if c.atFrameBoundary() && !c.writing && c.serverWaiting == 0 && c.err == nil {
			c.flushQueue()
			c.serverTurn.Signal()
		}
	}
	c.draining = false
}

// unblockWaiters unblocks each waiter at most once, until the queue is half full. It releases the lock for each call.
func (c *Conn) unblockWaiters() {
	for n := len(c.waiters); n > 0 && len(c.queue) < c.queueLimit()/2 && c.err == nil; n-- {
		next := c.waiters[0]
		c.waiters[0] = nil
		if c.waiters = c.waiters[1:]; len(c.waiters) == 0 {
			c.waiters = nil
		}
		c.mu.Unlock()
		next.Unblock()
		c.mu.Lock()
	}
}
