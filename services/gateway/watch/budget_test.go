package watch

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// returner counts how often it was let return, and takes what it costs.
type returner struct {
	b    *budget
	cost float64
	n    atomic.Int64
}

func (r *returner) Return() {
	if r.b.take(time.Now(), r.cost) {
		r.n.Add(1)
		return
	}
	r.b.later(r)
}

// A user has a burst, and then the rate; who waits comes in order, and nobody is left out.
func TestABudgetIsARate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := &Budgets{}
		b := all.join("a", 100)
		if all.join("a", 100) != b || all.join("b", 100) == b {
			t.Error("a budget is not its user's")
		}
		for range budgetBurst * 100 {
			if !b.take(time.Now(), 1) {
				t.Fatal("the burst is not there")
			}
		}
		if _, spent := b.spent(); b.take(time.Now(), 1) || !spent {
			t.Fatal("there is more than the burst")
		}
		var waiting []*returner
		for range 50 {
			r := &returner{b: b, cost: 10}
			waiting = append(waiting, r)
			b.later(r)
		}
		time.Sleep(time.Second + time.Millisecond) // of the bubble's clock, as all here
		synctest.Wait()
		sum := int64(0)
		for i, r := range waiting {
			if sum += r.n.Load(); i > 0 && r.n.Load() > waiting[i-1].n.Load() {
				t.Errorf("%d came before its turn", i)
			}
		}
		if sum < 9 || sum > 11 {
			t.Errorf("%d came in a second, want 10", sum)
		}
		time.Sleep(5 * time.Second)
		for i, r := range waiting {
			if r.n.Load() != 1 {
				t.Errorf("%d came %d times", i, r.n.Load())
			}
		}
	})
}

// Who leaves and comes back at once has no new burst; who comes back late has, and nothing is kept of who is gone.
func TestABudgetIsNotMadeAnewAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := &Budgets{}
		b := all.join("a", 100)
		b.spend(budgetBurst * 100 * 2)
		b.leave()
		again := all.join("a", 100)
		if owed, spent := again.spent(); again != b || !spent || owed < budgetBurst*time.Second {
			t.Errorf("leaving pays debts: %v are left", owed)
		}
		b.leave()
		time.Sleep(budgetBurst*2*time.Second + time.Second)
		synctest.Wait()
		all.mu.Lock()
		defer all.mu.Unlock()
		if len(all.of) > 0 {
			t.Error("the budget of who is gone is kept")
		}
	})
}

func TestNobodysBudgetNeverEnds(t *testing.T) {
	all := &Budgets{}
	for _, b := range []*budget{all.join("", 1), all.join("a", 0), (*Budgets)(nil).join("a", 1)} {
		b.spend(1e9)
		if _, spent := b.spent(); !b.take(time.Now(), 1e9) || spent || b.wait(t.Context()) != nil {
			t.Error("it has ended")
		}
		b.leave()
	}
}
