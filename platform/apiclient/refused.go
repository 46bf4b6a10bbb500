package apiclient

import (
	"errors"
	"net/http"
	"syscall"
	"time"

	"watershed.dev/platform/lifecycle"
)

const (
	// refusedPause is the pause before a request that no gateway accepted is sent again.
	refusedPause = 50 * time.Millisecond
	// refusedTimeout is how long a request waits for a gateway. Informers then back off, up to 30 s.
	refusedTimeout = 10 * time.Second
)

// retryRefused returns a transport that sends a request without a body again while the connection is refused. At the
// start of a cluster no gateway listens yet. Informers would back off, and the policies would be read seconds later.
func retryRefused(rt http.RoundTripper) http.RoundTripper { return refusedRetrier{rt} }

type refusedRetrier struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (r refusedRetrier) RoundTrip(req *http.Request) (*http.Response, error) {
	deadline := time.Now().Add(refusedTimeout)
	for {
		resp, err := r.RoundTripper.RoundTrip(req)
		if !errors.Is(err, syscall.ECONNREFUSED) || req.Body != nil || time.Now().After(deadline) {
			return resp, err
		}
		if lifecycle.Sleep(req.Context(), refusedPause) != nil {
			return nil, err
		}
	}
}

// WrappedRoundTripper implements an interface of k8s.io/apimachinery/pkg/util/net.
func (r refusedRetrier) WrappedRoundTripper() http.RoundTripper { return r.RoundTripper }
