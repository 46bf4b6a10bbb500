// Package wire lets many long-lived responses of one HTTP/2 connection be written together, by whoever has the data.
//
// Go's HTTP/2 server writes each flush of each response by itself: the handler's goroutine hands a frame to the
// connection's goroutine and waits, and mostly every frame is a TLS record and a system call of its own. A gateway that
// delivers one event to a thousand watchers does little else. A Conn stands between the TLS connection and the server.
// The server still speaks the protocol: settings, headers, priorities, errors, the beginning and the end of every
// response. But a handler may take its stream over; from then on the body is written as DATA frames that the Conn puts
// between the server's own frames, all that are due at once in one write, by no goroutine of the stream's own.
//
// Flow control stays whole because the Conn sees every frame. A stream that was taken has its window counted here, and
// the server no longer hears of it. Of the connection's window a part is withheld from the server, out of what the
// client adds to the first 65,535 bytes; only that part is spent on taken streams, and what the client gives back for
// it returns to it.
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

// Frame types and flags (RFC 9113, section 6), as the bytes that they are in a frame's head.
const (
	frameData         = byte(http2.FrameData)
	frameHeaders      = byte(http2.FrameHeaders)
	frameReset        = byte(http2.FrameRSTStream)
	frameSettings     = byte(http2.FrameSettings)
	framePush         = byte(http2.FramePushPromise)
	frameGoAway       = byte(http2.FrameGoAway)
	frameWindowUpdate = byte(http2.FrameWindowUpdate)
	frameContinuation = byte(http2.FrameContinuation)

	flagEndStream  = byte(http2.FlagDataEndStream) // of HEADERS too
	flagAck        = byte(http2.FlagSettingsAck)
	flagEndHeaders = byte(http2.FlagHeadersEndHeaders) // of CONTINUATION and PUSH_PROMISE too
	flagPadded     = byte(http2.FlagHeadersPadded)

	settingInitialWindow = http2.SettingInitialWindowSize
	settingMaxFrame      = http2.SettingMaxFrameSize

	frameHeaderBytes = 9
	defaultWindow    = 65535
	prefaceBytes     = len(http2.ClientPreface)
)

const (
	// minSendWindow is how much of the connection's window must have been withheld for a stream to be taken over. Go's
	// client opens with 1 GB and curl with 32 MB; who keeps to the protocol's 64 KB is served by the server alone.
	minSendWindow = 256 << 10
	// maxQueueBytes is how many bytes may wait for one connection's socket. Past it writers wait.
	maxQueueBytes = 1 << 20
	// smallBuffer is what a connection keeps for itself; for more it borrows a large one.
	smallBuffer = 128 << 10
	largeBuffer = maxQueueBytes + maxQueueBytes/256 + smallBuffer // with frames' heads
	// minWriteWindow is how much of a stream's window must be open before more of a long write is sent.
	minWriteWindow = 64 << 10
	// writeChunkBytes is how much is written to the socket at once: each has the connection's patience anew.
	writeChunkBytes = 64 << 10
	// maxStreams is how many streams of a connection are known here at most; the server bounds those that it answers
	// much lower.
	maxStreams = 4096
	// maxBufferedFrame is up to which length a frame is read as a whole; longer ones are passed on as they come.
	maxBufferedFrame = 64 << 10
)

var largeBuffers = sync.Pool{New: func() any { return new([largeBuffer]byte) }}

// grow makes room for n more bytes in the queue.
func (c *Conn) grow(n int) {
	if need := len(c.queue) + n; need <= cap(c.queue) || need <= smallBuffer {
		return
	}
	if cap(c.queue) < largeBuffer && len(c.queue)+n <= largeBuffer {
		c.queue = append(largeBuffers.Get().(*[largeBuffer]byte)[:0], c.queue...)
	}
}

// Conn is one HTTP/2 connection, between TLS and the server. Give it to http2.Server.ServeConn.
type Conn struct {
	*tls.Conn
	// writeTimeout is how long the socket may take nothing before the connection is given up.
	writeTimeout time.Duration
	// streamHeader is the request header that tells a handler which stream it answers: the server does not say. It is as
	// random as need be for no client to know it.
	streamHeader string

	// The reading side belongs to the server's reading goroutine.
	in      *bufio.Reader
	ready   []byte
	raw     int
	scratch []byte

	mu             sync.Mutex
	streams        map[uint32]*Stream
	lastStreamID   uint32 // the newest stream
	goAwaySent     bool   // the server has said that it takes no more
	initialWindow  int64  // a new stream's
	maxFrame       int
	sendWindow     int64 // what may be spent on taken streams
	sendUsed       int64 // what was, and has not been given back
	serverUsed     int64 // what the server spent, and has not been given back
	serverWindow   int64 // what the server believes to have left of the connection's window
	header         [frameHeaderBytes]byte
	headerRead     int  // of head
	payloadLeft    int  // of the server's frame that is being written
	headerBlock    bool // a header block goes on in the next frame: nothing may come between
	queue          []byte
	spare          []byte
	writing        bool
	draining       bool
	err            error
	serverTurn     sync.Cond     // the server waits for its turn to write
	serverWaiting  int           // how many of its writes do
	changed        chan struct{} // closed when a waiting writer may go on
	writersWaiting int
	waiters        []Waiter // who waits for room in the queue
	// partial is what the server has written of frames that are not whole yet; nothing of it is known to observe.
	partial []byte
	// corked: the queue ends with an answer's beginning, which release has written.
	corked    bool
	corkDelay time.Duration
	corkTimer *time.Timer
}

// NewConn returns a Conn on c, whose handshake is done and has chosen h2. When the client's side takes no byte for as
// long as patience, the connection is closed.
func NewConn(c *tls.Conn, writeTimeout time.Duration) *Conn {
	conn := &Conn{
		Conn:          c,
		writeTimeout:  writeTimeout,
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
	return conn
}

// Read gives the server what the client sends, without what concerns taken streams alone.
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

// readFrame reads one frame's head, and the whole of a frame that matters here.
func (c *Conn) readFrame() error {
	header, err := c.in.Peek(frameHeaderBytes)
	if err != nil {
		if len(header) > 0 { // the server is to see what there was
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

// receivedFrame takes note of a client's frame and answers what the server is to see of it.
func (c *Conn) receivedFrame(frame []byte, kind, flags byte, id uint32) []byte {
	body := frame[frameHeaderBytes:]
	switch kind {
	case frameHeaders:
		if id <= c.lastStreamID { // trailers, or nothing that the server will take
			return frame
		}
		c.lastStreamID = id
		if c.goAwaySent || len(c.streams) >= maxStreams { // the server will ignore it, or refuse it; or answer it alone
			return frame
		}
		s := &Stream{conn: c, id: id, window: c.initialWindow}
		c.streams[id] = s
		if flags&flagEndHeaders == 0 || flags&flagPadded != 0 {
			return frame
		}
		return c.addStreamHeader(frame, id)
	case frameReset:
		c.removeStream(id)
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
			return frame // an error, which is the server's to name
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

// addStreamHeader adds a header with the stream's id to a request: a literal without indexing (RFC 7541, section
// 6.2.2), which leaves the compression's state as it is.
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
	if change := window - c.initialWindow; change != 0 { // once, however often a frame says it
		c.initialWindow = window
		for _, s := range c.streams {
			s.window += change
		}
	}
	c.wake()
}

// distributeWindow shares what the client adds to the connection's window: first what was spent here returns, then what the
// server spent; of what is new each gets half.
func (c *Conn) distributeWindow(frame []byte, n int64) []byte {
	// streams that the client leaves unread must not starve the server
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

// Close ends the connection.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.err == nil {
		c.err = errConnClosed
	}
	c.wake()
	c.mu.Unlock()
	return c.Conn.Close()
}

// Flush writes what is queued, without waiting for it.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.scheduleDrain()
}

// scheduleDrain has what is queued written, and what waits for room queued, unless somebody does so already.
func (c *Conn) scheduleDrain() {
	if (len(c.queue) > 0 || len(c.waiters) > 0) && !c.draining && !c.writing && c.err == nil {
		c.draining = true
		go c.drain()
	}
}

// drain writes the queue as long as there is one, and lets those return who wait for room in it. The server's own
// frames go first: its Write takes the queue along.
func (c *Conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.atFrameBoundary() && !c.writing && c.serverWaiting == 0 && c.err == nil {
		c.unblockWaiters()
		if len(c.queue) == 0 {
			if len(c.waiters) == 0 {
				break
			}
			continue // the server has taken the queue along meanwhile: there is room again
		}
		if c.atFrameBoundary() && !c.writing && c.serverWaiting == 0 && c.err == nil {
			c.flushQueue()
			c.serverTurn.Signal()
		}
	}
	c.draining = false
}

// unblockWaiters lets those who wait for room return until the queue is half full, each once.
func (c *Conn) unblockWaiters() {
	for n := len(c.waiters); n > 0 && len(c.queue) < maxQueueBytes/2 && c.err == nil; n-- {
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
