// Package deflate compresses response bodies. It builds one gzip body (RFC 1952) of parts that were compressed
// separately, so that a part that many clients receive is compressed once.
//
// The package does not cache parts and starts no goroutine. Parts are immutable; a Sum is not safe for concurrent use.
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
	// Level is kube-apiserver's compression level. On a local network a smaller body is not worth more CPU time.
	Level = flate.BestSpeed
	// Threshold is the minimal size in bytes of a body that is compressed for clients that accept it. It is
	// kube-apiserver's (128 KB).
	Threshold = 128 << 10
	// TurnBytes is the number of bytes that one turn compresses, 0.1 to 1 ms of work.
	TurnBytes = 64 << 10
)

// AcceptsGzip returns true if the client accepts gzip. Like kube-apiserver, it ignores a gzip entry with a quality
// value.
func AcceptsGzip(h http.Header) bool {
	for e := range strings.SplitSeq(h.Get("Accept-Encoding"), ",") {
		if strings.TrimSpace(e) == "gzip" {
			return true
		}
	}
	return false
}

// turns is the process's semaphore of compression. All processors except one, and at least one, may compress at a time,
// a piece each. Without it ten large lists would be ten goroutines that never block. Each step of every small request
// would then queue behind them for about ten milliseconds.
var turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))

// Turn waits for a slot of the semaphore and runs work in it. work must not wait for a client.
func Turn(work func() error) error {
	turns <- struct{}{}
	defer func() { <-turns }()
	return work()
}

// Part is a compressed part of a body: blocks of a deflate stream (RFC 1951). The blocks end at a byte boundary and
// refer to no earlier data, so many bodies may contain the same part.
type Part struct {
	// Data contains the blocks. None of them has the final-block bit.
	Data []byte
	// Size is the uncompressed size in bytes.
	Size int64

	sum   uint32
	shift uint32 // x^(8·Size) modulo the polynomial of CRC-32
}

// compressors hold 800 KB each. No more are in use than there are turns and processors.
var compressors = sync.Pool{New: func() any {
	w, _ := flate.NewWriter(nil, Level)
	return &compressor{w: w}
}}

type compressor struct {
	w   *flate.Writer
	out bytes.Buffer
}

// turnlessBytes is the size of a part that is compressed without a turn, in about 20 µs. The wait for a turn may take
// longer.
const turnlessBytes = 8 << 10

// Compress returns the pieces compressed as one part. It compresses TurnBytes in each turn. The end of the part makes a
// decompressor return all of its data.
func Compress(pieces ...[]byte) *Part {
	p := &Part{}
	for _, piece := range pieces {
		p.Size += int64(len(piece))
	}
	if p.Size <= turnlessBytes {
		p.add(pieces)
	} else {
		for len(pieces) > 0 {
			_ = Turn(func() error { pieces = p.add(pieces); return nil })
		}
	}
	p.shift = shiftOf(p.Size)
	return p
}

// add appends up to TurnBytes of the pieces to the part, and returns the rest.
func (p *Part) add(pieces [][]byte) (rest [][]byte) {
	c := compressors.Get().(*compressor)
	defer compressors.Put(c)
	c.out.Reset()
	c.w.Reset(&c.out)
	defer c.w.Reset(nil)
	for n := 0; n < TurnBytes && len(pieces) > 0; {
		piece := pieces[0]
		if piece = piece[:min(len(piece), TurnBytes-n)]; len(piece) == len(pieces[0]) {
			pieces = pieces[1:]
		} else {
			pieces = append([][]byte{pieces[0][len(piece):]}, pieces[1:]...)
		}
		_, _ = c.w.Write(piece) // a write to a bytes.Buffer does not fail
		n += len(piece)
		p.sum = crc32.Update(p.sum, crc32.IEEETable, piece)
	}
	_ = c.w.Flush()
	p.Data = append(p.Data, c.out.Bytes()...)
	return pieces
}

// Stored returns data as stored blocks, a few bytes larger than data. Use it for data too short to justify a turn.
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

// Sum accumulates the checksum and the size of a gzip body.
type Sum struct {
	sum  uint32
	size int64
}

// Header returns the header of a gzip body: deflate, no name, no time, unknown OS, fastest compression.
func Header() []byte { return []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255} }

// Add adds the next part of the body.
func (s *Sum) Add(p *Part) {
	s.sum = multiply(p.shift, s.sum) ^ p.sum
	s.size += p.Size
}

// Trailer returns the end of the body: an empty final block, the checksum, and the size modulo 2^32.
func (s *Sum) Trailer() []byte {
	out := append(make([]byte, 0, 10), 0x03, 0x00)
	out = binary.LittleEndian.AppendUint32(out, s.sum)
	return binary.LittleEndian.AppendUint32(out, uint32(s.size))
}

// A CRC-32 is a polynomial over GF(2) modulo crc32.IEEE, with its bits in reverse order. Appending n bytes multiplies
// the polynomial of the data before them by x^(8n). The checksum of two parts therefore follows from their checksums
// (zlib's crc32_combine, crc32.c).

// multiply returns a·b.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a&(1<<31) != 0 {
			product ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return product
}

// squares holds x^(2^k).
var squares = func() (s [32]uint32) {
	s[0] = 1 << 30
	for k := 1; k < len(s); k++ {
		s[k] = multiply(s[k-1], s[k-1])
	}
	return s
}()

// shiftOf returns x^(8·size).
func shiftOf(size int64) uint32 {
	product := uint32(1 << 31)
	for k, n := 0, 8*size; n > 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			product = multiply(product, squares[k%len(squares)])
		}
	}
	return product
}
