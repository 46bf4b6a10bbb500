package rpc

import (
	"context"
	"sync"
	"time"
)

// mostAsked is how often a question is asked at most until it is answered.
const mostAsked = 4

// Hedged is the first answer of ask, which is asked once more, beside the others, after each while without one: a
// process that is frozen does not answer, and is given up by its connections after 13 seconds; who is asked next may be
// another. A failure is an answer too. Where it is known which replica the question is with (Preferring, Noting), and
// that answers others meanwhile, it is not asked again: it takes its time. ask is for what may be asked twice, runs at
// first on the caller's goroutine, and ends once its context does.
func Hedged[T any](ctx context.Context, while time.Duration, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := &hedge[T]{while: while, asked: 1, cancel: cancel}
	h.mu.Lock()
	h.again = time.AfterFunc(while, func() { h.askAgain(ctx, ask) })
	h.mu.Unlock()
	h.answer(ask(ctx))
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.value, h.err
}

// hedge is a question that may be asked again.
type hedge[T any] struct {
	while  time.Duration
	cancel context.CancelFunc

	mu       sync.Mutex
	again    *time.Timer
	asked    int
	answered bool
	value    T
	err      error
}

// answer takes the first answer, and ends whoever else was asked.
func (h *hedge[T]) answer(value T, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.answered {
		return
	}
	h.answered, h.value, h.err = true, value, err
	h.again.Stop()
	h.cancel()
}

func (h *hedge[T]) askAgain(ctx context.Context, ask func(context.Context) (T, error)) {
	h.mu.Lock()
	asks := !h.answered && !waits(ctx)
	if asks {
		h.asked++
	}
	if !h.answered && h.asked < mostAsked {
		h.again.Reset(h.while)
	}
	h.mu.Unlock()
	if asks {
		h.answer(ask(ctx))
	}
}
