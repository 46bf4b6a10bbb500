package egress

import (
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
)

const (
	// answerValues and answerValuesFactor bound the JSON values of a response, including values in base64 strings:
	// answerValues, and answerValuesFactor for each value of the request body.
	answerValues       = 200_000
	answerValuesFactor = 4
	// bytesPerValue is the assumed size of a value, in bytes, if the request body cannot be read again.
	bytesPerValue = 16
)

const (
	// maxReading bounds the bytes of large responses that are being read in a process: the bytes of each above
	// smallResponse. Small responses are always read, so that a webhook with large responses fails no other.
	maxReading    = 512 << 20
	smallResponse = 1 << 20
)

// LimitResponses returns a RoundTripper that fails responses over base bytes plus factor bytes for each byte of the
// request body. It also fails responses over 200,000 JSON values plus four for each value of the request, and large
// responses while a process reads 512 MB of them. Webhook clients read a whole response, and Go's transport
// decompresses gzip. Without a bound, a webhook could exhaust the memory of the service that calls it. kube-apiserver
// has no such bound.
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

// reading is the number of bytes of large responses that are being read in this process.
var reading atomic.Int64

// limitedBody reads at most remaining bytes. If the body is longer, it fails with err.
type limitedBody struct {
	io.ReadCloser
	at        string
	remaining int64
	// read is how many bytes have been read. counted is the part that is in reading until Close.
	read, counted int64
	err           error
	values        Values
	mostValues    int
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
	if b.read += int64(n); b.read > smallResponse {
		large := b.read - smallResponse - b.counted
		b.counted += large
		if reading.Add(large) > maxReading {
			b.remaining, b.err = -1, fmt.Errorf("the webhook at %s: too many large responses are being read", b.at)
			return 0, b.err
		}
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
	reading.Add(-b.counted)
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
