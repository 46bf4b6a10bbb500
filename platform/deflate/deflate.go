// Package deflate compresses answers' bodies, and makes one gzip body (RFC 1952) of parts that were compressed apart:
// what many are sent is compressed once.
package deflate

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math"
	"net/http"
	"runtime"
	"strings"
	"sync"

	"github.com/klauspost/compress/flate"
)

const (
	// Level is fast, and as small as what it is worth on a local network; kube-apiserver's.
	Level = flate.BestSpeed
	// Threshold is the size in bytes from which bodies are compressed for clients that want it, kube-apiserver's (128 KB).
	Threshold = 128 << 10
	// TurnBytes is how many bytes of a body are compressed in one turn: about a millisecond of work.
	TurnBytes = 64 << 10
)

// AcceptsGzip says whether a request's client takes gzip. With a quality it does not, as in kube-apiserver.
func AcceptsGzip(h http.Header) bool {
	for _, e := range strings.Split(h.Get("Accept-Encoding"), ",") {
		if strings.TrimSpace(e) == "gzip" {
			return true
		}
	}
	return false
}

// turns are the process' turns at compressing: all processors but one, and one at least, may do it at a time, a piece
// each. What compresses ten lists would otherwise be ten goroutines that never wait, and each step of everybody's small
// requests would stand in line behind them for ten milliseconds a time.
var turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))

// Turn does a piece of compressing when it is its turn. work must not wait for a client.
func Turn(work func() error) error {
	turns <- struct{}{}
	defer func() { <-turns }()
	return work()
}

// Part is a part of a body, compressed: blocks of a deflate stream (RFC 1951) that end with a whole byte and refer to
// nothing before them, so that they may stand in many bodies.
type Part struct {
	// Data are the blocks; none of them is marked as the last.
	Data []byte
	// Size is how many bytes they were.
	Size int64

	sum   uint32
	shift uint32 // x^(8·Size) modulo CRC-32's polynomial
}

var compressors = sync.Pool{New: func() any {
	w, _ := flate.NewWriter(nil, Level)
	return &compressor{w: w}
}}

type compressor struct {
	w   *flate.Writer
	out bytes.Buffer
}

// Compress compresses the pieces of a part, Piece bytes at a turn.
func Compress(pieces ...[]byte) (*Part, error) {
	c := compressors.Get().(*compressor)
	defer compressors.Put(c)
	c.out.Reset()
	c.w.Reset(&c.out)
	defer c.w.Reset(nil)
	p := &Part{}
	for len(pieces) > 0 {
		err := Turn(func() error {
			for n := 0; n < TurnBytes && len(pieces) > 0; {
				piece := pieces[0]
				if piece = piece[:min(len(piece), TurnBytes-n)]; len(piece) == len(pieces[0]) {
					pieces = pieces[1:]
				} else {
					pieces = append([][]byte{pieces[0][len(piece):]}, pieces[1:]...)
				}
				if _, err := c.w.Write(piece); err != nil {
					return err
				}
				n += len(piece)
				p.Size += int64(len(piece))
				p.sum = crc32.Update(p.sum, crc32.IEEETable, piece)
			}
			if len(pieces) > 0 {
				return nil
			}
			return c.w.Flush()
		})
		if err != nil {
			return nil, err
		}
	}
	p.Data = bytes.Clone(c.out.Bytes())
	p.shift = shiftOf(p.Size)
	return p, nil
}

// Stored is a part as it is, with a few bytes beside it: for what is short, and not worth waiting for a turn.
func Stored(data []byte) *Part {
	p := &Part{Size: int64(len(data)), sum: crc32.ChecksumIEEE(data), shift: shiftOf(int64(len(data)))}
	for len(data) > 0 {
		n := min(len(data), math.MaxUint16)
		p.Data = append(p.Data, 0) // not the last block, and stored
		p.Data = binary.LittleEndian.AppendUint16(p.Data, uint16(n))
		p.Data = binary.LittleEndian.AppendUint16(p.Data, ^uint16(n))
		p.Data = append(p.Data, data[:n]...)
		data = data[n:]
	}
	return p
}

// Sum sums up the parts of a gzip body.
type Sum struct {
	sum  uint32
	size int64
}

// Header begins a gzip body: deflate, no name, no time, any system, compressed fast.
func Header() []byte { return []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255} }

// Add counts in the body's next part.
func (s *Sum) Add(p *Part) {
	s.sum = multiply(p.shift, s.sum) ^ p.sum
	s.size += p.Size
}

// Trailer ends the body: a last block that is empty, the parts' checksum and their size modulo 2^32.
func (s *Sum) Trailer() []byte {
	out := append(make([]byte, 0, 10), 0x03, 0x00)
	out = binary.LittleEndian.AppendUint32(out, s.sum)
	return binary.LittleEndian.AppendUint32(out, uint32(s.size))
}

// A CRC-32 is a polynomial over GF(2) modulo crc32.IEEE, its bits in reverse order. What comes before n more bytes
// counts for x^(8n) as much, so the checksum of two parts is made of theirs (zlib's crc32_combine, crc32.c).

// multiply is a·b.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a&(1<<31) != 0 {
			product ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return product
}

// squares are x^(2^k).
var squares = func() (s [32]uint32) {
	s[0] = 1 << 30
	for k := 1; k < len(s); k++ {
		s[k] = multiply(s[k-1], s[k-1])
	}
	return s
}()

// shiftOf is x^(8·size).
func shiftOf(size int64) uint32 {
	product := uint32(1 << 31)
	for k, n := 0, 8*size; n > 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			product = multiply(product, squares[k%len(squares)])
		}
	}
	return product
}
