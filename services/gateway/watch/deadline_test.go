package watch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// expectEnd waits for the end of the watch.
func (c *client) expectEnd(t *testing.T) {
	t.Helper()
	select {
	case <-c.done:
	case <-time.After(2 * time.Minute):
		t.Fatal("the watch continues")
	}
}

func TestTheDeadlineEndsAReauthorization(t *testing.T) {
	silent := func(ctx context.Context) bool { <-ctx.Done(); return true } // authz does not respond
	up := newTier()
	up.write(6)
	hub(up).watch(t, func(r *Request) {
		r.Deadline = time.Now().Add(100 * time.Millisecond)
		r.Allowed = silent
	}).expectEnd(t)

	policyChanged, opened := make(chan struct{}), false
	open := hub(up).watch(t, func(r *Request) {
		r.Deadline = time.Now().Add(2 * time.Second)
		r.PolicyChanged = func() <-chan struct{} {
			if opened {
				return nil
			}
			return policyChanged
		}
		r.Allowed = func(ctx context.Context) bool {
			first := !opened
			opened = true
			return first || silent(ctx)
		}
	})
	open.expect(t, "e6 ")
	close(policyChanged)
	open.expectEnd(t)
}

// silentTier opens no stream before the end of its context.
type silentTier struct{ *fakeTier }

func (silentTier) Watch(ctx context.Context, _ *watchfanoutv1.WatchRequest, _ ...grpc.CallOption) (
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	<-ctx.Done()
	return nil, status.FromContextError(ctx.Err()).Err()
}

// A watch whose deadline passes before the tier responds ends without an error, as in kube-apiserver.
func TestTheDeadlineIsNoError(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Client = silentTier{up}
	for _, timeout := range []time.Duration{200 * time.Millisecond, -time.Second} {
		c := h.watch(t, func(r *Request) { r.Deadline = time.Now().Add(timeout) })
		c.expectEnd(t)
		c.expect(t, "")
	}
}

// stuckClient never completes a write or a hijack. Only their contexts end them: a client that accepts a byte now and
// then is not slow.
type stuckClient struct {
	*recordingSink
	hijacks, writes bool // which of them wait
	waits           *int // the number of calls that have waited
}

// Hijack implements Sink.
func (s stuckClient) Hijack(ctx context.Context) *h2writer.Stream {
	if s.hijacks {
		*s.waits++
		<-ctx.Done()
	}
	return nil
}

// Write implements Sink.
func (s stuckClient) Write(ctx context.Context, d time.Duration, frames ...[]byte) error {
	if !s.writes {
		return s.recordingSink.Write(ctx, d, frames...)
	}
	*s.waits++
	<-ctx.Done()
	return ctx.Err()
}

// A joined watch ends at its deadline while its client does not complete a hijack, and WriteTimeout later while its
// client accepts an event slowly.
func TestTheDeadlineEndsAWatchOfAStuckClient(t *testing.T) {
	const timeout = 5 * time.Minute
	for name, c := range map[string]struct {
		client stuckClient
		extra  time.Duration
	}{
		"a hijack": {stuckClient{hijacks: true}, 0},
		"a write":  {stuckClient{writes: true}, 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				up := newTier()
				h := hub(up)
				h.Config.WriteTimeout = 30 * time.Second
				t.Cleanup(func() { time.Sleep(time.Minute) }) // the broadcast's call ends later than the watch
				began, sink := time.Now(), c.client
				sink.recordingSink, sink.waits = newScreen(), new(int)
				watch := h.watchWith(t, sink, sink.recordingSink, func(r *Request) { r.Deadline = began.Add(timeout) })
				synctest.Wait()
				h.waitForReceivers(t, 1)
				up.write(6)
				synctest.Wait()
				if *sink.waits != 1 {
					t.Fatalf("%d calls of the client wait", *sink.waits)
				}
				select {
				case <-watch.done:
				case <-time.After(timeout + time.Hour):
					t.Fatal("the watch continues")
				}
				if took := time.Since(began); took != timeout+c.extra {
					t.Errorf("the watch ends after %v", took)
				}
			})
		})
	}
}
