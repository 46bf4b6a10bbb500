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
package wire

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

	headBytes    = 9
	firstWindow  = 65535
	prefaceBytes = len(http2.ClientPreface)
)

const (
	// leastBudget is how much of the connection's window must have been withheld for a stream to be taken over. Go's
	// client opens with 1 GB and curl with 32 MB; who keeps to the protocol's 64 KB is served by the server alone.
	leastBudget = 256 << 10
	// maxQueue is how many bytes may wait for one connection's socket. Past it writers wait.
	maxQueue = 1 << 20
	// smallBuffer is what a connection keeps for itself; for more it borrows a large one.
	smallBuffer = 128 << 10
	largeBuffer = maxQueue + maxQueue/256 + smallBuffer // with frames' heads
	// leastWrite is how much of a stream's window must be open before more of a long write is sent.
	leastWrite = 64 << 10
	// piece is how much is written to the socket at once: each has the connection's patience anew.
	piece = 64 << 10
	// maxStreams is how many streams of a connection are known here at most; the server bounds those that it answers
	// much lower.
	maxStreams = 4096
	// wholeFrame is up to which length a frame is read as a whole; longer ones are passed on as they come.
	wholeFrame = 64 << 10
)

var large = sync.Pool{New: func() any { return new([largeBuffer]byte) }}

// grow makes room for n more bytes in the queue.
func (c *Conn) grow(n int) {
	if need := len(c.queue) + n; need <= cap(c.queue) || need <= smallBuffer {
		return
	}
	if cap(c.queue) < largeBuffer && len(c.queue)+n <= largeBuffer {
		c.queue = append(large.Get().(*[largeBuffer]byte)[:0], c.queue...)
	}
}

// Conn is one HTTP/2 connection, between TLS and the server. Give it to http2.Server.ServeConn.
type Conn struct {
	*tls.Conn
	// patience is how long the socket may take nothing before the connection is given up.
	patience time.Duration
	// token is the request header that tells a handler which stream it answers: the server does not say. It is as
	// random as need be for no client to know it.
	token string

	// The reading side belongs to the server's reading goroutine.
	in      *bufio.Reader
	ready   []byte
	raw     int
	scratch []byte

	mu       sync.Mutex
	streams  map[uint32]*Stream
	highest  uint32 // the newest stream
	leaving  bool   // the server has said that it takes no more
	window   int64  // a new stream's
	maxFrame int
	budget   int64 // what may be spent on taken streams
	spent    int64 // what was, and has not been given back
	server   int64 // what the server spent, and has not been given back
	theirs   int64 // what the server believes to have left of the connection's window
	head     [headBytes]byte
	have     int  // of head
	payload  int  // of the server's frame that is being written
	block    bool // a header block goes on in the next frame: nothing may come between
	queue    []byte
	spare    []byte
	writing  bool
	draining bool
	err      error
	turn     sync.Cond     // the server waits for its turn to write
	queueing int           // how many of its writes do
	room     chan struct{} // closed when a waiting writer may go on
	waiting  int
	later    []Returner // who waits for room in the queue
	// begun is what the server has written of frames that are not whole yet; nothing of it is known to observe.
	begun []byte
	// held: the queue ends with an answer's beginning, which release has written.
	held    bool
	holdFor time.Duration
	release *time.Timer
}

// NewConn returns a Conn on c, whose handshake is done and has chosen h2. When the client's side takes no byte for as
// long as patience, the connection is closed.
func NewConn(c *tls.Conn, patience time.Duration) *Conn {
	w := &Conn{
		Conn:     c,
		patience: patience,
		theirs:   firstWindow,
		token:    "x-stream-" + strings.ToLower(rand.Text()),
		in:       bufio.NewReaderSize(c, 8<<10),
		raw:      prefaceBytes,
		streams:  map[uint32]*Stream{},
		window:   firstWindow,
		maxFrame: 16384,
		room:     make(chan struct{}),
		holdFor:  holdFor,
	}
	w.turn.L = &w.mu
	return w
}

// Read gives the server what the client sends, without what concerns taken streams alone.
func (c *Conn) Read(p []byte) (int, error) {
	for len(c.ready) == 0 && c.raw == 0 {
		if err := c.next(); err != nil {
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

// next reads one frame's head, and the whole of a frame that matters here.
func (c *Conn) next() error {
	head, err := c.in.Peek(headBytes)
	if err != nil {
		if len(head) > 0 { // the server is to see what there was
			c.raw = len(head)
			return nil
		}
		return err
	}
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	kind, flags, id := head[3], head[4], binary.BigEndian.Uint32(head[5:])&(1<<31-1)
	whole := kind == frameHeaders || kind == frameReset || kind == frameSettings || kind == frameWindowUpdate
	if !whole || length > wholeFrame {
		c.raw = headBytes + length
		return nil
	}
	if cap(c.scratch) < headBytes+length {
		c.scratch = make([]byte, 0, headBytes+length+128)
	}
	frame := c.scratch[:headBytes+length]
	if _, err := io.ReadFull(c.in, frame); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = c.arrived(frame, kind, flags, id)
	return nil
}

// arrived takes note of a client's frame and answers what the server is to see of it.
func (c *Conn) arrived(frame []byte, kind, flags byte, id uint32) []byte {
	body := frame[headBytes:]
	switch kind {
	case frameHeaders:
		if id <= c.highest { // trailers, or nothing that the server will take
			return frame
		}
		c.highest = id
		if c.leaving || len(c.streams) >= maxStreams { // the server will ignore it, or refuse it; or answer it alone
			return frame
		}
		s := &Stream{conn: c, id: id, window: c.window}
		c.streams[id] = s
		if flags&flagEndHeaders == 0 || flags&flagPadded != 0 {
			return frame
		}
		return c.addStreamHeader(frame, id)
	case frameReset:
		c.forget(id)
	case frameSettings:
		if flags&flagAck == 0 {
			c.settings(body)
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
			return c.credit(frame, n)
		}
		if s := c.streams[id]; s != nil {
			s.window += n
			if s.taken {
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
	frame = append(frame, 0, byte(len(c.token)))
	frame = append(frame, c.token...)
	frame = append(frame, byte(len(value)))
	frame = append(frame, value...)
	length := len(frame) - headBytes
	frame[0], frame[1], frame[2] = byte(length>>16), byte(length>>8), byte(length)
	c.scratch = frame[:0]
	return frame
}

func (c *Conn) settings(body []byte) {
	window := c.window
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
	if change := window - c.window; change != 0 { // once, however often a frame says it
		c.window = window
		for _, s := range c.streams {
			s.window += change
		}
	}
	c.wake()
}

// credit shares what the client adds to the connection's window: first what was spent here returns, then what the
// server spent; of what is new each gets half.
func (c *Conn) credit(frame []byte, n int64) []byte {
	// streams that the client leaves unread must not starve the server
	if c.theirs < firstWindow && c.budget > leastBudget {
		c.spent -= min(n, c.spent)
		c.theirs += n
		return frame
	}
	back := min(n, c.spent)
	c.spent -= back
	c.budget += back
	n -= back
	theirs := min(n, c.server)
	c.server -= theirs
	fresh := n - theirs
	c.budget += fresh / 2
	theirs += fresh - fresh/2
	c.theirs += theirs
	c.wake()
	if theirs == 0 {
		return nil
	}
	binary.BigEndian.PutUint32(frame[headBytes:], uint32(theirs))
	return frame
}

// Close ends the connection.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.err == nil {
		c.err = errClosed
	}
	c.wake()
	c.mu.Unlock()
	return c.Conn.Close()
}

// Flush writes what is queued, without waiting for it.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begin()
}

// begin has what is queued written, and what waits for room queued, unless somebody does so already.
func (c *Conn) begin() {
	if (len(c.queue) > 0 || len(c.later) > 0) && !c.draining && !c.writing && c.err == nil {
		c.draining = true
		go c.drain()
	}
}

// drain writes the queue as long as there is one, and lets those return who wait for room in it. The server's own
// frames go first: its Write takes the queue along.
func (c *Conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.between() && !c.writing && c.queueing == 0 && c.err == nil {
		c.refill()
		if len(c.queue) == 0 {
			if len(c.later) == 0 {
				break
			}
			continue // the server has taken the queue along meanwhile: there is room again
		}
		if c.between() && !c.writing && c.queueing == 0 && c.err == nil {
			c.send()
			c.turn.Signal()
		}
	}
	c.draining = false
}

// refill lets those who wait for room return until the queue is half full, each once.
func (c *Conn) refill() {
	for n := len(c.later); n > 0 && len(c.queue) < maxQueue/2 && c.err == nil; n-- {
		next := c.later[0]
		c.later[0] = nil
		if c.later = c.later[1:]; len(c.later) == 0 {
			c.later = nil
		}
		c.mu.Unlock()
		next.Return()
		c.mu.Lock()
	}
}
