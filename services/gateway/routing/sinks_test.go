package routing

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/services/gateway/h2writer"
)

// taker is a client that reads up to 64 KB in each interval of pace.
type taker struct {
	http.ResponseWriter
	pace  time.Duration
	until time.Time
	taken int
}

func (c *taker) SetWriteDeadline(until time.Time) error { c.until = until; return nil }
func (c *taker) FlushError() error                      { return nil }

func (c *taker) Write(p []byte) (int, error) {
	if left := time.Until(c.until); left < c.pace {
		time.Sleep(left)
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(c.pace)
	c.taken += len(p)
	return len(p), nil
}

// A client that reads a large write slowly receives all of it. A client that reads none of it within the write timeout
// is slow.
func TestAWatchIsCutOffIfItsClientTakesNothing(t *testing.T) {
	const timeout, bytes = 250 * time.Millisecond, 1 << 20
	for pace, want := range map[time.Duration]error{timeout / 2: nil, time.Hour: h2writer.ErrSlowClient} {
		synctest.Test(t, func(t *testing.T) {
			c, began := &taker{pace: pace}, time.Now()
			s := &httpSink{call: &requestContext{w: c}, control: http.NewResponseController(c)}
			err := s.Write(t.Context(), timeout, make([]byte, bytes/2), make([]byte, bytes/2))
			if !errors.Is(err, want) {
				t.Errorf("a write of 64 KB each %s: %v", pace, err)
			}
			if took := time.Since(began); err == nil && c.taken != bytes || err != nil && took != timeout {
				t.Errorf("%d bytes are taken in %s", c.taken, took)
			}
			if !c.until.IsZero() {
				t.Error("a deadline stays")
			}
		})
	}
}

// A write ends at the watch's deadline, and its client does not count as slow.
func TestAWriteEndsWithItsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c := &taker{pace: time.Hour}
		s := &httpSink{call: &requestContext{w: c}, control: http.NewResponseController(c)}
		if err := s.Write(ctx, time.Minute, []byte("x")); err == nil || errors.Is(err, h2writer.ErrSlowClient) {
			t.Error(err)
		}
	})
}
