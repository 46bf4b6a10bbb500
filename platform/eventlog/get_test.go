package eventlog

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// A request without a response is repeated, so the next leader responds soon. Any other error is the response.
func TestARequestFindsTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		request := func(leaderAfter time.Duration) func(context.Context) (string, error) {
			return func(ctx context.Context) (string, error) {
				if time.Since(began) >= leaderAfter {
					return "response", nil
				}
				<-ctx.Done()
				return "", ctx.Err()
			}
		}
		for _, after := range []time.Duration{0, 200 * time.Millisecond, time.Second, 3 * time.Second} {
			began = time.Now()
			response, err := attempt(t.Context(), request(after))
			if late := time.Since(began) - after; response != "response" || late > after/4+firstAttempt {
				t.Errorf("%v after the leader: %q, %v", late, response, err)
			}
		}
		began = time.Now()
		_, err := attempt(t.Context(), request(time.Hour))
		took := time.Since(began).Round(time.Second)
		if !errors.Is(err, context.DeadlineExceeded) || took != 9*time.Second {
			t.Errorf("without a leader: %v after %v", err, took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
		defer cancel()
		began = time.Now()
		if _, err := attempt(ctx, request(time.Hour)); err == nil || time.Since(began) != 400*time.Millisecond {
			t.Errorf("with a deadline: %v after %v", err, time.Since(began))
		}
		calls := 0
		_, err = attempt(t.Context(), func(context.Context) (int, error) { calls++; return 0, nats.ErrNoResponders })
		if calls != 1 || !errors.Is(err, nats.ErrNoResponders) {
			t.Errorf("%d calls, %v", calls, err)
		}
	})
}
