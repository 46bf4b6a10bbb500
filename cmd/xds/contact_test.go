package xds

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/lifecycle"
)

type roundTripper func() (*http.Response, error)

func (f roundTripper) RoundTrip(*http.Request) (*http.Response, error) { return f() }

// A server with stale endpoints stops serving for 10 s a minute, until the hosting API responds.
func TestAServerWithStaleEndpointsYields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		failure := errors.New("no route")
		status := http.StatusOK
		c := &contact{RoundTripper: roundTripper(func() (*http.Response, error) {
			return &http.Response{StatusCode: status}, failure
		})}
		request := func() { _, _ = c.RoundTrip(nil) }
		var ready lifecycle.Readiness
		var served []bool
		var at []time.Duration
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- c.yield(ctx, &ready, func(serving bool) {
				served, at = append(served, serving), append(at, time.Since(start))
			})
		}()
		expect := func(about string, err error, want ...time.Duration) {
			t.Helper()
			synctest.Wait()
			got := ready.Err()
			if (err == nil) != (got == nil) || err != nil && !errors.Is(got, err) {
				t.Errorf("%s: not ready: %v", about, got)
			}
			if !slices.Equal(at, want) {
				t.Errorf("%s: it changes at %v", about, at)
			}
			for i, serving := range served {
				if serving != (i%2 == 1) {
					t.Errorf("%s: %v", about, served)
				}
			}
		}
		time.Sleep(30 * time.Second)
		request() // the first failure
		time.Sleep(40 * time.Second)
		request()
		expect("failures for 40 s", nil)
		time.Sleep(65 * time.Second) // 135 s
		stale := []time.Duration{2 * staleAfter, 2*staleAfter + readyTimeout}
		expect("failures for 105 s", errStale, stale...)
		failure, status = nil, http.StatusForbidden
		request()
		time.Sleep(time.Minute) // 195 s
		stale = append(stale, 3*staleAfter+readyTimeout)
		expect("403 is a failure", errStale, stale...)
		status = http.StatusOK
		request()
		time.Sleep(time.Hour)
		expect("a response", nil, append(stale, 3*staleAfter+2*readyTimeout)...)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
