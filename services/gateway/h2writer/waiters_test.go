package h2writer

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines writes `total` lines to a stream, and waits in the connection's queue if it has no space.
type lines struct {
	t        *testing.T
	s        *Stream
	n, total int
	done     chan<- struct{}
}

func (l *lines) line(n int) []byte {
	return fmt.Appendf(nil, "%d%s\n", n, strings.Repeat("z", 100<<10))
}

// Unblock implements Waiter.
func (l *lines) Unblock() {
	for l.n < l.total {
		accepted, queueFull := l.s.TryWrite(l.line(l.n))
		if queueFull {
			l.s.EnqueueWaiter(l)
			return
		}
		if !accepted {
			l.t.Error("the stream accepts no data")
			break
		}
		l.n++
	}
	l.s.Flush()
	l.done <- struct{}{}
}

// Waiters for a full connection queue are unblocked until all their data is sent. This holds with and without frames of
// the server that would carry the queue along.
func TestWaitersAreUnblocked(t *testing.T) {
	for _, others := range []bool{false, true} {
		t.Run(fmt.Sprintf("others %v", others), func(t *testing.T) { testWaiters(t, others) })
	}
}

func testWaiters(t *testing.T, others bool) {
	const streams, each = 20, 30 // 3 MB each; a Go client accepts 4 MB
	hijacked, end, done := make(chan *Stream, streams), make(chan struct{}), make(chan struct{}, streams)
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	c := client(srv)
	var all sync.WaitGroup
	for range streams {
		body := open(t, c, srv.URL+"/watch").Body
		l := &lines{t: t, s: <-hijacked, total: each, done: done}
		all.Go(func() {
			r := bufio.NewReader(body)
			if head, err := r.ReadString('\n'); err != nil || head != "head\n" {
				t.Errorf("%q %v", head, err)
			}
			for n := range each {
				if got, err := r.ReadBytes('\n'); err != nil || !bytes.Equal(got, l.line(n)) {
					t.Errorf("line %d is of %d bytes, %v", n, len(got), err)
					return
				}
			}
		})
		all.Go(l.Unblock)
		if others {
			all.Go(func() {
				resp := open(t, c, srv.URL+"/other")
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					t.Error(err)
				}
			})
		}
	}
	timeout := time.After(2 * time.Minute)
	for n := range streams {
		select {
		case <-done:
		case <-timeout:
			t.Fatalf("%d of %d streams have sent everything", n, streams)
		}
	}
	close(end)
	all.Wait()
}
