package rpc

import (
	"context"
	"sync"
	"time"

	"watershed.dev/platform/recovery"
)

// maxAttempts is how often a question is asked at most until it is answered, and maxTrackedAttempts where it is known whom it was
// asked of: the second time it is another one.
const (
	maxAttempts        = 4
	maxTrackedAttempts = 2
)

// Hedged is the first answer of ask, which is asked once more, beside the others, after each while without one: a
// process that is frozen does not answer, and its connections give it up much later (Dial); who is asked next may be
// another. A failure is the answer where nobody else is being asked. Where it is known which replica the question is
// with (Preferring, Noting), it is asked again only once that one is silent, and once: one that answers others takes
// its time. ask is for what may be asked twice, runs at first on the caller's goroutine, and ends once its context
// does.
func Hedged[T any](ctx context.Context, delay time.Duration, fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := &hedge[T]{
		delay:       delay,
		maxAttempts: maxAttempts,
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

// hedge is a question that may be asked again.
type hedge[T any] struct {
	delay       time.Duration
	maxAttempts int
	cancel      context.CancelFunc

	mu    sync.Mutex
	timer *time.Timer
	// attempts is how often it was asked, and asking of how many an answer may come.
	attempts, inFlight int
	// done is closed once value and err are the answer.
	done  chan struct{}
	ended bool
	value T
	err   error
}

// finish takes the first answer, or the last failure, and ends whoever else was asked.
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
		defer recovery.ToError("asking again", &err)
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
