package rpc

import (
	"context"
	"sync"
	"time"

	"watershed.dev/platform/guard"
)

// mostAsked is how often a question is asked at most until it is answered, and mostNoted where it is known whom it was
// asked of: the second time it is another one.
const (
	mostAsked = 4
	mostNoted = 2
)

// Hedged is the first answer of ask, which is asked once more, beside the others, after each while without one: a
// process that is frozen does not answer, and its connections give it up much later (Dial); who is asked next may be
// another. A failure is the answer where nobody else is being asked. Where it is known which replica the question is
// with (Preferring, Noting), it is asked again only once that one is silent, and once: one that answers others takes
// its time. ask is for what may be asked twice, runs at first on the caller's goroutine, and ends once its context
// does.
func Hedged[T any](ctx context.Context, while time.Duration, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := &hedge[T]{
		while:  while,
		most:   mostAsked,
		asked:  1,
		asking: 1,
		done:   make(chan struct{}),
		cancel: cancel,
	}
	if noteOf(ctx) != nil {
		h.most = mostNoted
	}
	h.mu.Lock()
	h.again = time.AfterFunc(while, func() { h.askAgain(ctx, ask) })
	h.mu.Unlock()
	h.answer(ask(ctx))
	<-h.done
	return h.value, h.err
}

// hedge is a question that may be asked again.
type hedge[T any] struct {
	while  time.Duration
	most   int
	cancel context.CancelFunc

	mu    sync.Mutex
	again *time.Timer
	// asked is how often it was asked, and asking of how many an answer may come.
	asked, asking int
	// done is closed once value and err are the answer.
	done  chan struct{}
	ended bool
	value T
	err   error
}

// answer takes the first answer, or the last failure, and ends whoever else was asked.
func (h *hedge[T]) answer(value T, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asking--
	if h.ended || err != nil && h.asking > 0 {
		return
	}
	h.ended, h.value, h.err = true, value, err
	h.again.Stop()
	h.cancel()
	close(h.done)
}

func (h *hedge[T]) askAgain(ctx context.Context, ask func(context.Context) (T, error)) {
	if !h.mayAskAgain(ctx) {
		return
	}
	value, err := func() (value T, err error) {
		defer guard.Error("asking again", &err)
		return ask(ctx)
	}()
	h.answer(value, err)
}

func (h *hedge[T]) mayAskAgain(ctx context.Context) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return false
	}
	asks := !takesItsTime(ctx)
	if asks {
		h.asked, h.asking = h.asked+1, h.asking+1
		if n := noteOf(ctx); n != nil {
			n.with.Load().avoid()
		}
	}
	if h.asked < h.most {
		h.again.Reset(h.while)
	}
	return asks
}
