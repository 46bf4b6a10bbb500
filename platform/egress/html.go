package egress

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
)

const (
	// maxRewritten bounds an HTML response whose links are rewritten, in bytes. maxOutput bounds it after decompression
	// and with its links rewritten.
	maxRewritten = 4 << 20
	maxOutput    = 16 << 20
	// maxRewriting bounds the HTML responses that are rewritten in a process, and maxOwnRewriting the responses of
	// a user, in bytes of their output. Each counts until its client has read it.
	maxRewriting    = 256 << 20
	maxOwnRewriting = 32 << 20
)

// rewriting counts the bytes of the HTML responses that are being rewritten in this process.
var rewriting = htmlBytes{owners: map[string]int64{}}

type htmlBytes struct {
	mu     sync.Mutex
	all    int64
	owners map[string]int64
}

// add adds n bytes of an owner. It reports whether all bounds hold. The empty owner has no bound of its own.
func (h *htmlBytes) add(owner string, n int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all += n
	if h.owners[owner] += n; h.owners[owner] == 0 {
		delete(h.owners, owner)
	}
	return h.all <= maxRewriting && (owner == "" || h.owners[owner] <= maxOwnRewriting)
}

// LimitHTML returns a RoundTripper for a single request below upstream's proxy
// (k8s.io/apimachinery/pkg/util/proxy.Transport). That proxy reads a whole HTML response to rewrite its links, and also
// decompresses it. Longer responses pass with their links as they are, and so do further responses while the process
// rewrites maxRewriting bytes, or maxOwnRewriting of the request's owner. Call end when the response has been sent.
func LimitHTML(next http.RoundTripper, owner string) (limited http.RoundTripper, end func()) {
	h := &htmlLimit{next: next, owner: owner}
	return h, h.end
}

// htmlLimit is of a single request, whose goroutine calls all methods.
type htmlLimit struct {
	next    http.RoundTripper
	owner   string
	counted int64
}

// count counts n more bytes of the response, and reports whether all bounds hold.
func (h *htmlLimit) count(n int64) bool {
	h.counted += n
	return rewriting.add(h.owner, n)
}

// end removes the response from the count.
func (h *htmlLimit) end() { h.count(-h.counted) }

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
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(&read, rest), rest}
	if read.Len() <= maxRewritten && !errors.Is(err, errTooManyRewritten) { // the proxy finds any other error itself
		prefix := len(req.Header.Get("X-Forwarded-Uri")) // it begins with the prefix of links
		size := outputBytes(resp.Header.Get("Content-Encoding"), read.Bytes(), prefix)
		if size <= maxOutput && h.count(max(0, size-int64(read.Len()))) {
			return resp, nil
		}
	}
	h.end()
	// Media types are case-insensitive, and the proxy rewrites only this spelling.
	resp.Header.Set("Content-Type", strings.TrimSuffix("text/HTML;"+parameters, ";"))
	return resp, nil
}

var errTooManyRewritten = errors.New("too many bytes of HTML responses are being rewritten")

// countingReader counts the bytes of a response that is rewritten.
type countingReader struct {
	io.Reader
	limit *htmlLimit
}

// Read implements io.Reader. It fails after the bytes that exceed a bound.
func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if !r.limit.count(int64(n)) && err == nil {
		err = errTooManyRewritten
	}
	return n, err
}

// outputBytes returns about how many bytes a page takes after decompression, with a prefix before each of its links.
// The result exceeds maxOutput if the page does.
func outputBytes(encoding string, body []byte, prefix int) int64 {
	r := io.Reader(bytes.NewReader(body))
	switch encoding {
	case "gzip":
		z, err := gzip.NewReader(r)
		if err != nil {
			return 0 // the proxy reports it
		}
		r = z
	case "deflate":
		r = flate.NewReader(r)
	}
	growth := &growthCounter{prefix: int64(prefix)}
	n, _ := io.Copy(growth, io.LimitReader(r, maxOutput+1))
	return n + growth.bytes
}

// growthCounter counts by how many bytes a page may grow when its links get a prefix. A link follows a "=". The proxy
// escapes the values of attributes: up to five bytes for each quote and each "&".
type growthCounter struct{ prefix, bytes int64 }

// Write implements io.Writer.
func (c *growthCounter) Write(p []byte) (int, error) {
	count := func(s string) int64 { return int64(bytes.Count(p, []byte(s))) }
	c.bytes += 2*c.prefix*count("=") + 4*(count("'")+count(`"`)+count("&"))
	return len(p), nil
}
