package body

import (
	"bytes"
	"net/http"
	"strconv"
	"sync"

	"github.com/klauspost/compress/gzip"

	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/deflate"
)

var gzipWriters = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, deflate.Level)
	return w
}}

// flushBytes is how many compressed bytes are buffered before they are written to the client.
const flushBytes = 16 << 10

// Writer writes a response body, compressed if that saves time.
type Writer struct {
	w  http.ResponseWriter
	gz *gzip.Writer
	// out holds compressed bytes that are not written yet.
	out bytes.Buffer
}

// NewWriter sends the response headers. size is the body's, or -1 if it is unknown.
func NewWriter(w http.ResponseWriter, req *http.Request, contentType string, code int, size int64) *Writer {
	h := w.Header()
	h.Set("Content-Type", contentType)
	b := &Writer{w: w}
	if ShouldCompress(req, size) {
		SetGzipHeaders(h)
		b.gz = gzipWriters.Get().(*gzip.Writer)
		b.gz.Reset(&b.out)
	} else if size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	w.WriteHeader(code)
	return b
}

// NewEncoded sends the headers of a response whose body the caller writes already encoded. gzip reports whether it is
// compressed.
func NewEncoded(w http.ResponseWriter, contentType string, code int, gzip bool) *Writer {
	h := w.Header()
	h.Set("Content-Type", contentType)
	if gzip {
		SetGzipHeaders(h)
	}
	w.WriteHeader(code)
	return &Writer{w: w}
}

// SetGzipHeaders sets the headers of a gzip body.
func SetGzipHeaders(h http.Header) {
	h.Set("Content-Encoding", "gzip")
	h.Add("Vary", "Accept-Encoding")
}

// ShouldCompress reports whether a response of `size` bytes is compressed for this client.
func ShouldCompress(req *http.Request, size int64) bool {
	return size > deflate.Threshold && AcceptsGzip(req)
}

// AcceptsGzip reports whether a response may be compressed for this client.
func AcceptsGzip(req *http.Request) bool {
	return deflate.AcceptsGzip(req.Header) &&
		utilfeature.DefaultFeatureGate.Enabled(features.APIResponseCompression)
}

// Write implements io.Writer. It holds no compression slot while it waits for the client.
func (b *Writer) Write(p []byte) (int, error) {
	if b.gz == nil {
		return b.w.Write(p)
	}
	for written := 0; written < len(p); {
		piece := p[written:min(len(p), written+deflate.TurnBytes)]
		if err := deflate.Turn(func() error { _, err := b.gz.Write(piece); return err }); err != nil {
			return written, err
		}
		written += len(piece)
		if err := b.flushCompressed(flushBytes); err != nil {
			return written, err
		}
	}
	return len(p), nil
}

// flushCompressed writes the compressed bytes if there are at least `minimum`.
func (b *Writer) flushCompressed(minimum int) error {
	if b.out.Len() < minimum {
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
	err := deflate.Turn(b.gz.Close)
	b.gz.Reset(nil) // the pool must not retain the ResponseWriter
	gzipWriters.Put(b.gz)
	b.gz = nil
	if err != nil {
		return err
	}
	return b.flushCompressed(1)
}
