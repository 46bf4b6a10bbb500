package egress

import (
	"fmt"
	"io"
	"net/http"
)

// BoundAnswers returns a RoundTripper whose answers fail after base bytes and factor bytes for each of the request's
// body. Clients of webhooks read an answer whole, and Go's transport expands gzip. Without a bound, a webhook could
// fill the memory of the service that calls it; kube-apiserver has none.
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
	resp.Body = &boundedBody{resp.Body, most, fmt.Errorf("the webhook at %s%s answers with more than %d bytes",
		req.URL.Host, req.URL.Path, most)}
	return resp, nil
}

// boundedBody reads at most left bytes, and then fails with err unless the body has ended.
type boundedBody struct {
	io.ReadCloser
	left int64
	err  error
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
	return n, err
}
