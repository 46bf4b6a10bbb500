package egress

import (
	"fmt"
	"io"
	"net/http"
	"sync"
)

const (
	// answerValues and answerValuesFactor bound the JSON values of a response, including values in base64 strings:
	// answerValues, and answerValuesFactor for each value of the request body.
	answerValues       = 200_000
	answerValuesFactor = 4
	// bytesPerValue is the assumed size of a value, in bytes, if the request body cannot be read again.
	bytesPerValue = 16
)

// Bounds of the bytes of responses that are being read in a process, for all webhooks and for a webhook. A first
// response may exceed the webhook's bound.
const (
	maxReading    = 256 << 20
	maxOwnReading = 64 << 20
)

// LimitResponses returns a RoundTripper that fails responses over base bytes plus factor bytes for each byte of the
// request body. It also fails responses over 200,000 JSON values plus four for each value of the request. Responses
// that are read at a time may have 64 MB of a webhook, and 256 MB of all webhooks. Webhook clients read a whole
// response, and Go's transport decompresses gzip. Without a bound, a webhook could exhaust the memory of the service
// that calls it. kube-apiserver has no such bound.
func LimitResponses(next http.RoundTripper, base, factor int64) http.RoundTripper {
	return &limitedTransport{next, base, factor}
}

type limitedTransport struct {
	next         http.RoundTripper
	base, factor int64
}

// RoundTrip implements http.RoundTripper.
func (b *limitedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	limit := b.base + b.factor*max(req.ContentLength, 0)
	at := req.URL.Host + req.URL.Path
	resp.Body = &limitedBody{
		ReadCloser: resp.Body,
		at:         at,
		remaining:  limit,
		err:        fmt.Errorf("the webhook at %s answers with more than %d bytes", at, limit),
		values:     Values{Base64: true},
		mostValues: answerValues,
		request:    req,
	}
	return resp, nil
}

// reading counts the bytes of the responses that are being read in this process.
var reading = &readings{of: map[string]int{}}

type readings struct {
	mu    sync.Mutex
	bytes int
	of    map[string]int
}

// add counts n more bytes of a response of which before bytes are counted. It returns false if a bound is exceeded.
func (r *readings) add(webhook string, before, n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes += n
	r.of[webhook] += n
	return r.bytes <= maxReading && (r.of[webhook] <= maxOwnReading || r.of[webhook] == before+n)
}

func (r *readings) remove(webhook string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes -= n
	if r.of[webhook] -= n; r.of[webhook] <= 0 {
		delete(r.of, webhook)
	}
}

// limitedBody reads at most remaining bytes. If the body is longer, it fails with err.
type limitedBody struct {
	io.ReadCloser
	at        string
	remaining int64
	// counted are the bytes in reading, until Close.
	counted    int
	err        error
	values     Values
	mostValues int
	// request is nil once mostValues includes the values of the request. They are counted only for responses with many
	// values.
	request *http.Request
}

// Read implements io.Reader.
func (b *limitedBody) Read(p []byte) (int, error) {
	if b.remaining < 0 {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	if b.remaining -= int64(n); b.remaining < 0 {
		return n + int(b.remaining), b.err
	}
	fits := reading.add(b.at, b.counted, n)
	if b.counted += n; !fits {
		b.remaining, b.err = -1, fmt.Errorf("the webhook at %s: too many large responses are being read", b.at)
		return 0, b.err
	}
	_, _ = b.values.Write(p[:n])
	if b.values.Count() > b.mostValues && b.request != nil {
		b.mostValues += answerValuesFactor * requestValues(b.request)
		b.request = nil
	}
	if b.values.Count() > b.mostValues {
		b.remaining, b.err = -1, fmt.Errorf("the webhook at %s answers with more than %d values", b.at, b.mostValues)
		return 0, b.err
	}
	return n, err
}

// Close implements io.Closer.
func (b *limitedBody) Close() error {
	reading.remove(b.at, b.counted)
	b.counted = 0
	return b.ReadCloser.Close()
}

// requestValues returns the number of JSON values in a request body.
func requestValues(req *http.Request) int {
	if req.GetBody != nil {
		if body, err := req.GetBody(); err == nil {
			defer body.Close()
			v := Values{Base64: true}
			if _, err := io.Copy(&v, body); err == nil {
				return v.Count()
			}
		}
	}
	return int(max(req.ContentLength, 0) / bytesPerValue)
}
