package watch

import (
	"context"
	"sync"
	"time"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/services/gateway/h2writer"
)

const (
	// waiterInterval is the period at which waiters are checked.
	waiterInterval = 10 * time.Millisecond
)

// RateLimiter limits the events that users' watches receive, with a token bucket per user that refills at
// Config.UserRate. Over the rate, events arrive later and in batches; none is dropped. The zero value is ready to use.
type RateLimiter struct {
	mu       sync.Mutex
	limiters map[string]*limiter
}

// join returns the limiter of a user, until leave. It is nil, which never limits, without a rate or for the empty
// owner.
func (r *RateLimiter) join(owner string, rate int) *limiter {
	if r == nil || rate <= 0 || owner == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.limiters[owner]
	if l == nil {
		l = &limiter{parent: r, owner: owner, bucket: core.NewBucket(rate, time.Now())}
		if r.limiters == nil {
			r.limiters = map[string]*limiter{}
		}
		r.limiters[owner] = l
	}
	l.watches++
	return l
}

// limiter is a user's token bucket. It is safe for concurrent use. Nil never limits; enqueueWaiter must not be called
// on nil.
type limiter struct {
	parent  *RateLimiter
	owner   string
	watches int // watches that hold it; guarded by parent.mu

	mu      sync.Mutex
	bucket  core.Bucket
	waiters []h2writer.Waiter
	// scheduled: a timer will call unblockWaiters. unblocking: a waiter's Unblock is running, so tryAcquire ignores the
	// queue.
	scheduled, unblocking bool
}

// leave releases the limiter. It is deleted when its bucket would be full, so a user that reconnects gets no new burst.
func (l *limiter) leave() {
	if l == nil {
		return
	}
	l.parent.mu.Lock()
	defer l.parent.mu.Unlock()
	if l.watches--; l.watches > 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Refill(time.Now())
	time.AfterFunc(l.bucket.UntilFull()+waiterInterval, func() {
		l.parent.mu.Lock()
		defer l.parent.mu.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.bucket.Refill(time.Now())
		if l.watches == 0 && l.bucket.UntilFull() <= 0 && l.parent.limiters[l.owner] == l {
			delete(l.parent.limiters, l.owner)
		}
	})
}

// tryAcquire takes cost tokens if any token is left and no other watch waits. A cost above the balance becomes a debt,
// for which the user's other watches wait.
func (l *limiter) tryAcquire(now time.Time, cost float64) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Refill(now)
	if l.bucket.Empty() || len(l.waiters) > 0 && !l.unblocking {
		return false
	}
	l.bucket.Charge(cost)
	return true
}

// charge takes cost tokens unconditionally. A negative cost returns tokens.
func (l *limiter) charge(cost float64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Refill(time.Now())
	l.bucket.Charge(cost)
}

// exhausted reports whether no token is left, and how long it takes until a token is.
func (l *limiter) exhausted() (delay time.Duration, exhausted bool) {
	if l == nil {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Refill(time.Now())
	return l.bucket.UntilToken(), l.bucket.Empty()
}

// wait waits until a token is left.
func (l *limiter) wait(ctx context.Context) error {
	delay, exhausted := l.exhausted()
	if !exhausted {
		return nil
	}
	throttledWatches.Inc()
	defer throttledWatches.Dec()
	for ; exhausted; delay, exhausted = l.exhausted() {
		if err := lifecycle.Sleep(ctx, max(delay, waiterInterval)); err != nil {
			return err
		}
	}
	return nil
}

// enqueueWaiter calls r.Unblock when a token is left, in FIFO order.
func (l *limiter) enqueueWaiter(r h2writer.Waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiters = append(l.waiters, r)
	throttledWatches.Inc()
	if !l.scheduled {
		l.scheduled = true
		time.AfterFunc(waiterInterval, l.unblockWaiters)
	}
}

// unblockWaiters unblocks waiters while tokens are left. It releases the lock for each call.
func (l *limiter) unblockWaiters() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bucket.Refill(time.Now())
	for n := len(l.waiters); n > 0 && !l.bucket.Empty(); n-- {
		next := l.waiters[0]
		l.waiters[0] = nil
		l.waiters = l.waiters[1:]
		throttledWatches.Dec()
		l.unblocking = true
		l.mu.Unlock()
		next.Unblock()
		l.mu.Lock()
		l.unblocking = false
	}
	if l.scheduled = len(l.waiters) > 0; l.scheduled {
		time.AfterFunc(waiterInterval, l.unblockWaiters)
	}
}
