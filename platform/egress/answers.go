package egress

import (
	"fmt"
	"io"
	"net/http"
)

const (
	// answerValues and answerValuesFactor bound the JSON values of an answer, with those of strings in base64: that
	// many, and as many for each value of the request's body.
	answerValues       = 200_000
	answerValuesFactor = 4
	// bytesPerValue is how many bytes a value has in a request whose body cannot be read again.
	bytesPerValue = 16
)

// BoundAnswers returns a RoundTripper whose answers fail after base bytes and factor bytes for each of the request's
// body, or after 200,000 JSON values and four for each of the request's. Clients of webhooks read an answer whole, and
// Go's transport expands gzip. Without a bound, a webhook could fill the memory of the service that calls it;
// kube-apiserver has none.
func BoundAnswers(next http.RoundTripper, base, factor int64) http.RoundTripper {
	return &bounded{next, base, factor}
}

type bounded struct {
	next         http.RoundTripper
	base, factor int64
}

// RoundTrip implements http.RoundTripper.
func (b *bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	most := b.base + b.factor*max(req.ContentLength, 0)
	at := req.URL.Host + req.URL.Path
	resp.Body = &boundedBody{
		ReadCloser: resp.Body,
		at:         at,
		left:       most,
		err:        fmt.Errorf("the webhook at %s answers with more than %d bytes", at, most),
		values:     Values{Base64: true},
		mostValues: answerValues,
		request:    req,
	}
	return resp, nil
}

// boundedBody reads at most left bytes, and then fails with err unless the body has ended.
type boundedBody struct {
	io.ReadCloser
	at         string
	left       int64
	err        error
	values     Values
	mostValues int
	// request is nil once mostValues includes its values. They are counted only if the answer has many.
	request *http.Request
}

// Read implements io.Reader.
func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left < 0 {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return n + int(b.left), b.err
	}
	_, _ = b.values.Write(p[:n])
	if b.values.Count() > b.mostValues && b.request != nil {
		b.mostValues += answerValuesFactor * requestValues(b.request)
		b.request = nil
	}
	if b.values.Count() > b.mostValues {
		b.left, b.err = -1, fmt.Errorf("the webhook at %s answers with more than %d values", b.at, b.mostValues)
		return 0, b.err
	}
	return n, err
}

// requestValues returns how many JSON values the body of a request has.
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
