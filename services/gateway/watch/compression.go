package watch

import (
	"watershed.dev/platform/deflate"
)

// gzipBody is the state of a response that is a gzip body. The watch's goroutine owns it, and the broadcast does while
// the receiver is synced. Its methods return the bytes to write. The owner calls sent once they are written.
type gzipBody struct {
	sum   deflate.Sum
	begun bool
	// broken: the client may have a fragment of a part, so the body cannot be completed.
	broken bool
}

// part returns the bytes of a part.
func (g *gzipBody) part(p *deflate.Part) [][]byte {
	if g.begun {
		return [][]byte{p.Data}
	}
	return [][]byte{deflate.Header(), p.Data}
}

// sent records that a part was written.
func (g *gzipBody) sent(p *deflate.Part) {
	g.begun = true
	g.sum.Add(p)
}

// end returns the bytes that complete the body.
func (g *gzipBody) end() [][]byte { return g.part(&deflate.Part{Data: g.sum.Trailer()}) }
