package xds

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"watershed.dev/platform/lifecycle"
)

// contact is a transport to the API of the hosting cluster. It records since when requests fail. The zero value has
// no failure.
type contact struct {
	http.RoundTripper
	failing atomic.Pointer[time.Time]
}

// RoundTrip implements http.RoundTripper.
func (c *contact) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(r)
	if err == nil && resp.StatusCode < http.StatusMultipleChoices {
		c.failing.Store(nil)
		return resp, err
	}
	now := time.Now()
	c.failing.CompareAndSwap(nil, &now)
	return resp, err
}

// staleAfter is how long requests to the hosting API fail until the endpoints count as stale. It is also the period of
// the check.
const staleAfter = time.Minute

var errStale = errors.New("requests fail for a minute: the endpoints may be stale")

// yield gives the clients of a server with stale endpoints to another replica: the server does not serve for
// readyTimeout. Then it serves again, because the hosting API may fail for all replicas. It repeats this each minute.
func (c *contact) yield(ctx context.Context, ready *lifecycle.Readiness, serve func(bool)) error {
	for {
		if err := lifecycle.Sleep(ctx, staleAfter); err != nil {
			return err
		}
		since := c.failing.Load()
		if since == nil || time.Since(*since) < staleAfter {
			ready.Set("hosting API", nil)
			continue
		}
		ready.Set("hosting API", errStale)
		serve(false)
		if err := lifecycle.Sleep(ctx, readyTimeout); err != nil {
			return err
		}
		serve(true)
	}
}
