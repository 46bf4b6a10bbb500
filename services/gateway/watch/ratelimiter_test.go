package watch

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/watchcache/core"
)

// waiter counts its Unblock calls that acquired tokens.
type waiter struct {
	l         *limiter
	cost      float64
	unblocked atomic.Int64
}

func (r *waiter) Unblock() {
	if r.l.tryAcquire(time.Now(), r.cost) {
		r.unblocked.Add(1)
		return
	}
	r.l.enqueueWaiter(r)
}

// A user has a burst, and then the rate. Waiters run in FIFO order, each exactly once.
func TestRateLimiterRefillsAtItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiters := &RateLimiter{}
		l := limiters.join("a", 100)
		if limiters.join("a", 100) != l || limiters.join("b", 100) == l {
			t.Error("a limiter belongs to another user")
		}
		for range core.BurstSeconds * 100 {
			if !l.tryAcquire(time.Now(), 1) {
				t.Fatal("the burst is too small")
			}
		}
		if _, exhausted := l.exhausted(); l.tryAcquire(time.Now(), 1) || !exhausted {
			t.Fatal("the burst is too large")
		}
		var waiting []*waiter
		for range 50 {
			r := &waiter{l: l, cost: 10}
			waiting = append(waiting, r)
			l.enqueueWaiter(r)
		}
		time.Sleep(time.Second + time.Millisecond) // the synctest bubble's clock, as everywhere in this test
		synctest.Wait()
		sum := int64(0)
		for i, r := range waiting {
			if sum += r.unblocked.Load(); i > 0 && r.unblocked.Load() > waiting[i-1].unblocked.Load() {
				t.Errorf("waiter %d ran before its turn", i)
			}
		}
		if sum < 9 || sum > 11 {
			t.Errorf("%d waiters ran in a second, want 10", sum)
		}
		time.Sleep(5 * time.Second)
		for i, r := range waiting {
			if r.unblocked.Load() != 1 {
				t.Errorf("waiter %d ran %d times", i, r.unblocked.Load())
			}
		}
	})
}

// A user that reconnects at once has no new burst. After its bucket is full, its limiter is deleted.
func TestLimiterSurvivesReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiters := &RateLimiter{}
		l := limiters.join("a", 100)
		l.charge(core.BurstSeconds * 100 * 2)
		l.leave()
		again := limiters.join("a", 100)
		if delay, exhausted := again.exhausted(); again != l || !exhausted || delay < core.BurstSeconds*time.Second {
			t.Errorf("reconnecting clears the debt: %v left", delay)
		}
		l.leave()
		time.Sleep(core.BurstSeconds*2*time.Second + time.Second)
		synctest.Wait()
		limiters.mu.Lock()
		defer limiters.mu.Unlock()
		if len(limiters.limiters) > 0 {
			t.Error("the limiter of a user without watches remains")
		}
	})
}

func TestNilLimiterIsUnlimited(t *testing.T) {
	limiters := &RateLimiter{}
	for _, l := range []*limiter{limiters.join("", 1), limiters.join("a", 0), (*RateLimiter)(nil).join("a", 1)} {
		l.charge(1e9)
		if _, exhausted := l.exhausted(); !l.tryAcquire(time.Now(), 1e9) || exhausted || l.wait(t.Context()) != nil {
			t.Error("a nil limiter limits")
		}
		l.leave()
	}
}
