package watch

import (
	"context"
	"sync"
	"time"

	"watershed.dev/services/gateway/wire"
)

const (
	// budgetBurst is for how many seconds' worth of events a user may be ahead of the rate.
	budgetBurst = 10
	// budgetPause is how often it is looked whether those who wait may go on.
	budgetPause = 10 * time.Millisecond
	// budgetUnit is how many bytes of an event cost as much as an event.
	budgetUnit = 1 << 10
)

// Budgets are what users' watches may be delivered: a token bucket for each user, of Config.UserRate. Who has spent it
// gets what comes later and together, and nothing less of it. The zero value is ready to use.
type Budgets struct {
	mu sync.Mutex
	of map[string]*budget
}

// join is the budget of a user, until leave; nil, which never ends, where there is no rate or the user is nobody's in
// particular.
func (b *Budgets) join(owner string, rate int) *budget {
	if b == nil || rate <= 0 || owner == "" {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.of[owner]
	if u == nil {
		u = &budget{all: b, owner: owner, rate: float64(rate), tokens: budgetBurst * float64(rate), at: time.Now()}
		if b.of == nil {
			b.of = map[string]*budget{}
		}
		b.of[owner] = u
	}
	u.users++
	return u
}

// budget is one user's token bucket. Its methods may be called by any number of goroutines, and but for later on nil,
// which never ends.
type budget struct {
	all   *Budgets
	owner string
	rate  float64 // a second
	users int     // watches that have it; guarded by all's lock

	mu      sync.Mutex
	tokens  float64 // below 0: a debt
	at      time.Time
	waiting []wire.Returner
	// serving: somebody will look after those who wait. turn: one of them is let return; whoever else takes something
	// meanwhile passes by the others.
	serving, turn bool
}

// leave gives the budget back. It is forgotten once it would be full again: who comes back at once has what was left.
func (b *budget) leave() {
	if b == nil {
		return
	}
	b.all.mu.Lock()
	defer b.all.mu.Unlock()
	if b.users--; b.users > 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(time.Now())
	full := time.Duration((budgetBurst*b.rate-b.tokens)/b.rate*float64(time.Second)) + budgetPause
	time.AfterFunc(full, func() {
		b.all.mu.Lock()
		defer b.all.mu.Unlock()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.refill(time.Now())
		if b.users == 0 && b.tokens >= budgetBurst*b.rate && b.all.of[b.owner] == b {
			delete(b.all.of, b.owner)
		}
	})
}

// refill is called with the lock held.
func (b *budget) refill(now time.Time) {
	if passed := now.Sub(b.at).Seconds(); passed > 0 {
		b.tokens = min(b.tokens+passed*b.rate, budgetBurst*b.rate)
		b.at = now
	}
}

// costOf is what events of some bytes together cost.
func costOf(events, bytes int) float64 { return float64(events + bytes/budgetUnit) }

// take spends a cost where anything is left and nobody waits for it who has not the turn. What costs more is a debt:
// the user's others wait for that.
func (b *budget) take(now time.Time, cost float64) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	if b.tokens <= 0 || len(b.waiting) > 0 && !b.turn {
		return false
	}
	b.tokens -= cost
	return true
}

// spend is take of what is sent in any case; below 0 it gives back.
func (b *budget) spend(cost float64) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(time.Now())
	b.tokens -= cost
}

// spent says whether nothing is left, and how long it takes until something is.
func (b *budget) spent() (owed time.Duration, spent bool) {
	if b == nil {
		return 0, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(time.Now())
	return time.Duration(-b.tokens / b.rate * float64(time.Second)), b.tokens <= 0
}

// wait waits until something is left.
func (b *budget) wait(ctx context.Context) error {
	owed, spent := b.spent()
	if !spent {
		return nil
	}
	waitingForRate.Inc()
	defer waitingForRate.Dec()
	for ; spent; owed, spent = b.spent() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(owed, budgetPause)):
		}
	}
	return nil
}

// later has r return when something is left, in the order in which they came.
func (b *budget) later(r wire.Returner) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = append(b.waiting, r)
	waitingForRate.Inc()
	if !b.serving {
		b.serving = true
		time.AfterFunc(budgetPause, b.serve)
	}
}

// serve lets those return who wait, as long as something is left.
func (b *budget) serve() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(time.Now())
	for n := len(b.waiting); n > 0 && b.tokens > 0; n-- {
		next := b.waiting[0]
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
		waitingForRate.Dec()
		b.turn = true
		b.mu.Unlock()
		next.Return()
		b.mu.Lock()
		b.turn = false
	}
	if b.serving = len(b.waiting) > 0; b.serving {
		time.AfterFunc(budgetPause, b.serve)
	}
}
