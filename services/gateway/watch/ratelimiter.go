package watch

import (
	"context"
	"sync"
	"time"

	"watershed.dev/services/gateway/h2writer"
)

const (
	// burstSeconds is for how many seconds' worth of events a user may be ahead of the rate.
	burstSeconds = 10
	// waiterInterval is how often it is looked whether those who wait may go on.
	waiterInterval = 10 * time.Millisecond
	// bytesPerToken is how many bytes of an event cost as much as an event.
	bytesPerToken = 1 << 10
)

// RateLimiter are what users' watches may be delivered: a token bucket for each user, of Config.UserRate. Who has spent it
// gets what comes later and together, and nothing less of it. The zero value is ready to use.
type RateLimiter struct {
	mu       sync.Mutex
	limiters map[string]*limiter
}

// join is the budget of a user, until leave; nil, which never ends, where there is no rate or the user is nobody's in
// particular.
func (r *RateLimiter) join(owner string, rate int) *limiter {
	if r == nil || rate <= 0 || owner == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.limiters[owner]
	if l == nil {
		l = &limiter{
			parent:     r,
			owner:      owner,
			rate:       float64(rate),
			tokens:     burstSeconds * float64(rate),
			refilledAt: time.Now(),
		}
		if r.limiters == nil {
			r.limiters = map[string]*limiter{}
		}
		r.limiters[owner] = l
	}
	l.watches++
	return l
}

// limiter is one user's token bucket. Its methods may be called by any number of goroutines, and but for later on nil,
// which never ends.
type limiter struct {
	parent  *RateLimiter
	owner   string
	rate    float64 // a second
	watches int     // watches that have it; guarded by all's lock

	mu         sync.Mutex
	tokens     float64 // below 0: a debt
	refilledAt time.Time
	waiters    []h2writer.Waiter
	// scheduled: somebody will look after those who wait. turn: one of them is let return; whoever else takes something
	// meanwhile passes by the others.
	scheduled, unblocking bool
}

// leave gives the budget back. It is forgotten once it would be full again: who comes back at once has what was left.
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
	l.refill(time.Now())
	refillTime := time.Duration((burstSeconds*l.rate-l.tokens)/l.rate*float64(time.Second)) + waiterInterval
	time.AfterFunc(refillTime, func() {
		l.parent.mu.Lock()
		defer l.parent.mu.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.refill(time.Now())
		if l.watches == 0 && l.tokens >= burstSeconds*l.rate && l.parent.limiters[l.owner] == l {
			delete(l.parent.limiters, l.owner)
		}
	})
}

// refill is called with the lock held.
func (l *limiter) refill(now time.Time) {
	if elapsed := now.Sub(l.refilledAt).Seconds(); elapsed > 0 {
		l.tokens = min(l.tokens+elapsed*l.rate, burstSeconds*l.rate)
		l.refilledAt = now
	}
}

// eventCost is what events of some bytes together cost.
func eventCost(events, bytes int) float64 { return float64(events + bytes/bytesPerToken) }

// tryAcquire spends a cost where anything is left and nobody waits for it who has not the turn. What costs more is a debt:
// the user's others wait for that.
func (l *limiter) tryAcquire(now time.Time, cost float64) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refill(now)
	if l.tokens <= 0 || len(l.waiters) > 0 && !l.unblocking {
		return false
	}
	l.tokens -= cost
	return true
}

// charge is take of what is sent in any case; below 0 it gives back.
func (l *limiter) charge(cost float64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refill(time.Now())
	l.tokens -= cost
}

// exhausted says whether nothing is left, and how long it takes until something is.
func (l *limiter) exhausted() (delay time.Duration, exhausted bool) {
	if l == nil {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refill(time.Now())
	return time.Duration(-l.tokens / l.rate * float64(time.Second)), l.tokens <= 0
}

// wait waits until something is left.
func (l *limiter) wait(ctx context.Context) error {
	delay, exhausted := l.exhausted()
	if !exhausted {
		return nil
	}
	throttledWatches.Inc()
	defer throttledWatches.Dec()
	for ; exhausted; delay, exhausted = l.exhausted() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(delay, waiterInterval)):
		}
	}
	return nil
}

// enqueueWaiter has r return when something is left, in the order in which they came.
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

// unblockWaiters lets those return who wait, as long as something is left.
func (l *limiter) unblockWaiters() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refill(time.Now())
	for n := len(l.waiters); n > 0 && l.tokens > 0; n-- {
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
