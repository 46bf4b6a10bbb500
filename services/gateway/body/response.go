package body

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// gzipAbove is the size from which answers are compressed for clients that want it, kube-apiserver's (128 KB).
const gzipAbove = 128 << 10

var gzips = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, 1) // level 1 is fast, and as small as what it is worth on a local network
	return w
}}

// compressors are the turns at compressing: all processors but one, and one at least, may do it at a time, a piece
// each. What compresses ten lists would otherwise be ten goroutines that never wait, and each step of everybody's small
// requests would stand in line behind them for ten milliseconds a time.
var compressors = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))

const (
	// compressPiece is how much is compressed in one turn: about a millisecond of work.
	compressPiece = 64 << 10
	// compressedAtOnce is from how many compressed bytes on they are written to the client.
	compressedAtOnce = 16 << 10
)

// Writer writes an answer, compressed where that pays.
type Writer struct {
	w  http.ResponseWriter
	gz *gzip.Writer
	// out is what gz has made and nobody has sent yet.
	out bytes.Buffer
}

// NewWriter sends the head. size is the body's, or -1 where it is not known.
func NewWriter(w http.ResponseWriter, req *http.Request, contentType string, code int, size int64) *Writer {
	h := w.Header()
	h.Set("Content-Type", contentType)
	b := &Writer{w: w}
	if Compressed(req, size) {
		h.Set("Content-Encoding", "gzip")
		h.Add("Vary", "Accept-Encoding")
		b.gz = gzips.Get().(*gzip.Writer)
		b.gz.Reset(&b.out)
	} else if size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	w.WriteHeader(code)
	return b
}

// Compressed says whether an answer of some size is compressed for who asks.
func Compressed(req *http.Request, size int64) bool { return size > gzipAbove && acceptsGzip(req) }

func acceptsGzip(req *http.Request) bool {
	for _, e := range strings.Split(req.Header.Get("Accept-Encoding"), ",") {
		if strings.TrimSpace(e) == "gzip" { // with a quality kube-apiserver does not take it either
			return true
		}
	}
	return false
}

// Write implements io.Writer. No turn at compressing is held while the client is waited for.
func (b *Writer) Write(p []byte) (int, error) {
	if b.gz == nil {
		return b.w.Write(p)
	}
	for written := 0; written < len(p); {
		piece := p[written:min(len(p), written+compressPiece)]
		if err := b.compress(func() error { _, err := b.gz.Write(piece); return err }); err != nil {
			return written, err
		}
		written += len(piece)
		if err := b.send(compressedAtOnce); err != nil {
			return written, err
		}
	}
	return len(p), nil
}

// compress does a piece of work when it is its turn.
func (*Writer) compress(work func() error) error {
	compressors <- struct{}{}
	defer func() { <-compressors }()
	return work()
}

// send writes what is compressed, if that is some bytes at least.
func (b *Writer) send(least int) error {
	if b.out.Len() < least {
		return nil
	}
	_, err := b.out.WriteTo(b.w)
	return err
}

// Close ends the body.
func (b *Writer) Close() error {
	if b.gz == nil {
		return nil
	}
	err := b.compress(b.gz.Close)
	b.gz.Reset(nil) // it is not to keep what it wrote to
	gzips.Put(b.gz)
	b.gz = nil
	if err != nil {
		return err
	}
	return b.send(1)
}
