package frame

// ChunkBytes is how many bytes of a body one message of a stream carries: Chunks.Bytes and the size of Split.
const ChunkBytes = 256 << 10

// Chunks sends a body in pieces, many at a time. Pieces are not copied and must not be changed. It is for one
// goroutine.
type Chunks struct {
	// Bytes is about how many bytes are sent at a time.
	Bytes int
	// Send is called with the next pieces. size is the whole body's in bytes the first time, and then 0.
	Send func(pieces [][]byte, size int64) error

	pieces [][]byte
	bytes  int
	size   int64
	err    error
}

// Begin says how many bytes the body has.
func (c *Chunks) Begin(size int64) { c.size = size }

// Add adds the body's next bytes. Its error is Send's, and goes for all that follows.
func (c *Chunks) Add(b []byte) error {
	if c.err != nil {
		return c.err
	}
	c.pieces = append(c.pieces, b)
	if c.bytes += len(b); c.bytes >= c.Bytes {
		c.flush()
	}
	return c.err
}

func (c *Chunks) flush() {
	c.err = c.Send(c.pieces, c.size)
	c.size = 0
	c.pieces, c.bytes = make([][]byte, 0, len(c.pieces)), 0
}

// End sends what has not been sent, and answers the first error of Send. More may be added after it.
func (c *Chunks) End() error {
	if c.err == nil && len(c.pieces) > 0 {
		c.flush()
	}
	return c.err
}

// Split sends a body in pieces of at most size bytes, one at least.
func Split(body []byte, size int, send func([]byte) error) error {
	for first := true; first || len(body) > 0; first = false {
		n := min(len(body), size)
		if err := send(body[:n]); err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}
