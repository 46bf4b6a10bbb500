package egress

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
)

const (
	// maxRewritten bounds an HTML response whose links are rewritten, in bytes before and after decompression.
	maxRewritten = 4 << 20
	// maxRewriting bounds the HTML responses that are rewritten in a process, in bytes. Each counts until its client
	// has read it.
	maxRewriting = 128 << 20
)

// rewriting is the number of bytes of the HTML responses that are being rewritten in this process.
var rewriting atomic.Int64

// LimitHTML returns a RoundTripper for a single request below upstream's proxy
// (k8s.io/apimachinery/pkg/util/proxy.Transport). That proxy reads a whole HTML response to rewrite its links, and also
// decompresses it. Longer responses pass with their links as they are, and so do all while the process rewrites
// maxRewriting bytes. Call end when the response has been sent.
func LimitHTML(next http.RoundTripper) (limited http.RoundTripper, end func()) {
	h := &htmlLimit{next: next}
	return h, func() { rewriting.Add(-h.counted.Swap(0)) }
}

type htmlLimit struct {
	next    http.RoundTripper
	counted atomic.Int64
}

// RoundTrip implements http.RoundTripper.
func (h *htmlLimit) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := h.next.RoundTrip(req)
	if err != nil || resp.Header.Get("Location") != "" {
		return resp, err
	}
	contentType, parameters, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	if strings.TrimSpace(contentType) != "text/html" {
		return resp, nil
	}
	var read bytes.Buffer
	_, err = io.Copy(&read, io.LimitReader(&countingReader{resp.Body, h}, maxRewritten+1))
	rest := resp.Body
	resp.Body = &restOfBody{io.MultiReader(&read, rest), rest}
	short := read.Len() <= maxRewritten && fits(resp.Header.Get("Content-Encoding"), read.Bytes())
	if short && !errors.Is(err, errTooManyRewritten) { // the proxy finds any other error itself
		return resp, nil
	}
	// Media types are case-insensitive, and the proxy rewrites only this spelling.
	resp.Header.Set("Content-Type", strings.TrimSuffix("text/HTML;"+parameters, ";"))
	return resp, nil
}

// restOfBody is a body whose beginning has been read.
type restOfBody struct {
	io.Reader
	io.Closer
}

var errTooManyRewritten = errors.New("too many bytes of HTML responses are being rewritten")

// countingReader counts the bytes of a response that is rewritten.
type countingReader struct {
	io.Reader
	limit *htmlLimit
}

// Read implements io.Reader. It fails before it reads anything if the bound is reached.
func (r *countingReader) Read(p []byte) (int, error) {
	if rewriting.Load() >= maxRewriting {
		return 0, errTooManyRewritten
	}
	n, err := r.Reader.Read(p)
	r.limit.counted.Add(int64(n))
	rewriting.Add(int64(n))
	return n, err
}

// fits reports whether a body has at most maxRewritten bytes after decompression. The proxy does not decompress other
// encodings.
func fits(encoding string, body []byte) bool {
	var r io.Reader
	switch encoding {
	case "gzip":
		z, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return true // the proxy reports it
		}
		r = z
	case "deflate":
		r = flate.NewReader(bytes.NewReader(body))
	default:
		return true
	}
	n, _ := io.Copy(io.Discard, io.LimitReader(r, maxRewritten+1))
	return n <= maxRewritten
}
