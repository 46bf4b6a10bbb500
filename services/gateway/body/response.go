package body

import (
	"compress/gzip"
	"net/http"
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

// Writer writes an answer, compressed where that pays.
type Writer struct {
	w  http.ResponseWriter
	gz *gzip.Writer
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
		b.gz.Reset(w)
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

func (b *Writer) Write(p []byte) (int, error) {
	if b.gz != nil {
		return b.gz.Write(p)
	}
	return b.w.Write(p)
}

// Close ends the body.
func (b *Writer) Close() error {
	if b.gz == nil {
		return nil
	}
	err := b.gz.Close()
	gzips.Put(b.gz)
	b.gz = nil
	return err
}
