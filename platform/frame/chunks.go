package frame

// ChunkBytes is the number of bytes of a body in one message of a stream. Callers use it for Chunks.Bytes and Split.
const ChunkBytes = 256 << 10

// Chunks sends a body in chunks of several pieces. Pieces are not copied, so callers must not change them. A Chunks
// belongs to one goroutine.
type Chunks struct {
	// Bytes is the approximate size of a chunk.
	Bytes int
	// Send is called with the pieces of a chunk. size is the size of the whole body in the first call, and then 0.
	Send func(pieces [][]byte, size int64) error

	pieces [][]byte
	bytes  int
	size   int64
	err    error
}

// Begin sets the size of the body in bytes.
func (c *Chunks) Begin(size int64) { c.size = size }

// Add adds the next bytes of the body. An error of Send is returned by this call and by all later calls.
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

// End sends the remaining pieces, and returns the first error of Send. Add may be called after it.
func (c *Chunks) End() error {
	if c.err == nil && len(c.pieces) > 0 {
		c.flush()
	}
	return c.err
}

// Split sends a body in pieces of at most ChunkBytes. An empty body is an empty piece.
func Split(body []byte, send func([]byte) error) error {
	for first := true; first || len(body) > 0; first = false {
		n := min(len(body), ChunkBytes)
		if err := send(body[:n]); err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}
