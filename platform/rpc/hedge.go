package rpc

import (
	"context"
	"sync"
	"time"

	"watershed.dev/platform/recovery"
)

// maxAttempts bounds the calls of fn by Hedged. maxTrackedAttempts bounds them if the replica of the call is tracked,
// because the second call then goes to another replica.
const (
	maxAttempts        = 4
	maxTrackedAttempts = 2
)

// Hedged calls fn and returns its first result. If fn has not returned after delay, Hedged calls it again in parallel,
// up to maxAttempts times. A later call may reach another replica: a frozen replica does not respond, and its
// connections break much later (see Dial). An error is the result only if no other call of fn is in flight.
//
// If the replica is tracked (WithAffinity, TrackReplica), Hedged calls fn again at most once, and only while the
// replica is unresponsive. It does not hedge a slow call at a replica that responds to other calls.
//
// Use it only if fn is idempotent and returns when its context is done. The first call runs on the caller's goroutine.
func Hedged[T any](ctx context.Context, delay time.Duration, fn func(context.Context) (T, error)) (T, error) {
	return hedged(ctx, delay, maxAttempts, fn)
}

// HedgedOnce is Hedged for calls with large responses: it calls fn again at most once.
func HedgedOnce[T any](ctx context.Context, delay time.Duration, fn func(context.Context) (T, error)) (T, error) {
	const attempts = 2
	return hedged(ctx, delay, attempts, fn)
}

func hedged[T any](ctx context.Context, delay time.Duration, attempts int,
	fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := &hedge[T]{
		delay:       delay,
		maxAttempts: attempts,
		attempts:    1,
		inFlight:    1,
		done:        make(chan struct{}),
		cancel:      cancel,
	}
	if callStateOf(ctx) != nil {
		h.maxAttempts = maxTrackedAttempts
	}
	h.mu.Lock()
	h.timer = time.AfterFunc(delay, func() { h.attempt(ctx, fn) })
	h.mu.Unlock()
	h.finish(fn(ctx))
	<-h.done
	return h.value, h.err
}

// hedge is the state of a Hedged call.
type hedge[T any] struct {
	delay       time.Duration
	maxAttempts int
	cancel      context.CancelFunc

	mu    sync.Mutex
	timer *time.Timer
	// attempts counts the calls of fn. inFlight counts the calls that have not returned.
	attempts, inFlight int
	// done is closed once value and err are the result.
	done  chan struct{}
	ended bool
	value T
	err   error
}

// finish records the first result or the last error, and cancels the other calls.
func (h *hedge[T]) finish(value T, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inFlight--
	if h.ended || err != nil && h.inFlight > 0 {
		return
	}
	h.ended, h.value, h.err = true, value, err
	h.timer.Stop()
	h.cancel()
	close(h.done)
}

func (h *hedge[T]) attempt(ctx context.Context, fn func(context.Context) (T, error)) {
	if !h.beginAttempt(ctx) {
		return
	}
	value, err := func() (value T, err error) {
		defer recovery.ToError("a hedged call", &err)
		return fn(ctx)
	}()
	h.finish(value, err)
}

func (h *hedge[T]) beginAttempt(ctx context.Context) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return false
	}
	start := !isResponsive(ctx)
	if start {
		h.attempts, h.inFlight = h.attempts+1, h.inFlight+1
		if n := callStateOf(ctx); n != nil {
			n.replica.Load().eject()
		}
	}
	if h.attempts < h.maxAttempts {
		h.timer.Reset(h.delay)
	}
	return start
}
