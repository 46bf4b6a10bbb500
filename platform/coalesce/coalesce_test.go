package coalesce

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Callers that arrive while a read is in flight share the next read.
func TestAReadingThatBeganBeforeIsNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{}
		var n atomic.Int32
		read := func(context.Context) (int, error) {
			mine := n.Add(1)
			time.Sleep(time.Second)
			return int(mine), nil
		}
		var wg sync.WaitGroup
		got := make([]int, 11)
		wg.Go(func() { got[0], _ = g.Get(t.Context(), "k", read) })
		synctest.Wait()
		for i := 1; i <= 10; i++ {
			wg.Go(func() { got[i], _ = g.Get(t.Context(), "k", read) })
		}
		wg.Wait()
		if got[0] != 1 || n.Load() != 2 {
			t.Errorf("the first got %d, of %d readings", got[0], n.Load())
		}
		for _, v := range got[1:] {
			if v != 2 {
				t.Errorf("a later one got reading %d", v)
			}
		}
		synctest.Wait()
		if len(g.names)+len(g.waiting)+len(g.ownerQueue)+g.running != 0 {
			t.Errorf("%d names are left, %d owners wait", len(g.names), len(g.waiting))
		}
	})
}

func TestReadingsAreBoundedAndAPanicIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 2}
		var mu sync.Mutex
		var now, most int
		var wg sync.WaitGroup
		for _, k := range []string{"a", "b", "c", "d", "e"} {
			wg.Go(func() {
				_, err := g.Get(t.Context(), k, func(context.Context) (int, error) {
					mu.Lock()
					now++
					most = max(most, now)
					mu.Unlock()
					time.Sleep(time.Second)
					mu.Lock()
					now--
					mu.Unlock()
					panic("boom")
				})
				if err == nil {
					t.Error("no error")
				}
			})
		}
		wg.Wait()
		if most != 2 {
			t.Errorf("%d at a time", most)
		}
	})
}

func TestReadsWithoutCallersAreNotMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{}
		var n atomic.Int32
		read := func(context.Context) (int, error) { n.Add(1); time.Sleep(time.Second); return 0, nil }
		go g.Get(t.Context(), "k", read)
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { _, err := g.Get(ctx, "k", read); done <- err }()
		synctest.Wait()
		cancel()
		if err := <-done; err == nil {
			t.Error("no error")
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n.Load() != 1 {
			t.Errorf("%d readings", n.Load())
		}
	})
}

// A caller that leaves ends all its reads: waiting reads take no turn, and the read in flight is canceled.
func TestReadsWithoutCallersAreCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 1}
		var begun, cancelled atomic.Int32
		read := func(ctx context.Context) (int, error) {
			begun.Add(1)
			select {
			case <-ctx.Done():
				cancelled.Add(1)
				return 0, ctx.Err()
			case <-time.After(time.Hour):
				return 1, nil
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 100 {
			go func() { _, _ = g.Get(ctx, fmt.Sprint(i), read) }()
		}
		synctest.Wait()
		if begun.Load() != 1 {
			t.Errorf("%d at once", begun.Load())
		}
		began := time.Now()
		cancel()
		synctest.Wait()
		if begun.Load() != cancelled.Load() || time.Since(began) > 0 ||
			len(g.names)+len(g.waiting)+len(g.ownerQueue)+g.running != 0 {
			t.Errorf("%d begun, %d cancelled, %d names are left, %d under way",
				begun.Load(), cancelled.Load(), len(g.names), g.running)
		}
		if v, err := g.Get(t.Context(), "x", func(context.Context) (int, error) {
			return 7, nil
		}); v != 7 || err != nil || time.Since(began) > 0 {
			t.Errorf("%d, %v after %v", v, err, time.Since(began))
		}
	})
}

// With Finish a read in flight continues without callers, within Timeout. A waiting read does not start.
func TestABegunReadingFinishes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Finish: true, Timeout: 10 * time.Second}
		var begun, finished atomic.Int32
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, _ = g.Get(ctx, "k", func(ctx context.Context) (int, error) {
				begun.Add(1)
				<-ctx.Done()
				finished.Add(1)
				return 0, ctx.Err()
			})
			cancel()
		}
		synctest.Wait()
		if b, f := begun.Load(), finished.Load(); b != 1 || f != 0 {
			t.Errorf("%d readings have begun, %d have finished", b, f)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if b, f := begun.Load(), finished.Load(); b != 1 || f != 1 {
			t.Errorf("in the end %d readings have begun, %d have finished", b, f)
		}
	})
}

// Owners take turns. An owner with many reads waits for its own reads, and the number of its waiting reads is bounded.
func TestOwnersTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 1, Queue: 20}
		var mu sync.Mutex
		var order []string
		ask := func(owner, name string) error {
			_, err := g.GetFor(t.Context(), owner, name, func(context.Context) (int, error) {
				time.Sleep(time.Second)
				mu.Lock()
				defer mu.Unlock()
				order = append(order, owner)
				return 0, nil
			})
			return err
		}
		var wg sync.WaitGroup
		for i := range 21 {
			wg.Go(func() {
				if err := ask("greedy", fmt.Sprint("greedy", i)); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		if err := ask("greedy", "one more"); !errors.Is(err, ErrBusy) {
			t.Errorf("an owner's queue has no bound: %v", err)
		}
		for i := range 3 {
			wg.Go(func() { _ = ask("other", fmt.Sprint("other", i)) })
		}
		wg.Wait()
		if got := strings.Join(order[:7], " "); got != "greedy greedy other greedy other greedy other" {
			t.Error(got)
		}
	})
}

// The slow reads of an owner leave places to others, and each of them leads to its next read.
func TestAnOwnerHasSoManyReadsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 4, PerOwner: 3}
		began := time.Now()
		ask := func(owner, name string) time.Duration {
			_, _ = g.GetFor(t.Context(), owner, name, func(context.Context) (int, error) {
				time.Sleep(time.Second)
				return 0, nil
			})
			return time.Since(began)
		}
		var wg sync.WaitGroup
		took := make([]time.Duration, 9)
		for i := range took {
			wg.Go(func() { took[i] = ask("greedy", fmt.Sprint(i)) })
			synctest.Wait()
		}
		if other := ask("other", "a"); other != time.Second {
			t.Errorf("another owner's read ends after %v", other)
		}
		wg.Wait()
		for i, d := range took {
			if want := time.Duration(i/3+1) * time.Second; d != want {
				t.Errorf("read %d ends after %v, not %v", i, d, want)
			}
		}
	})
}

// A caller that joins another owner's waiting read does not wait for that owner's turn.
func TestAJoinedReadingComesWithTheFirstTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 1, Queue: 20}
		ask := func(owner, name string) {
			_, _ = g.GetFor(t.Context(), owner, name, func(context.Context) (int, error) {
				time.Sleep(time.Second)
				return 0, nil
			})
		}
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() { ask("greedy", fmt.Sprint(i)) })
			synctest.Wait()
		}
		began := time.Now()
		ask("other", "15") // the last of greedy's
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("after %v", took)
		}
		wg.Wait()
		synctest.Wait()
		if len(g.names)+len(g.waiting)+len(g.ownerQueue)+g.running != 0 {
			t.Errorf("%d names are left, %d owners wait", len(g.names), len(g.waiting))
		}
	})
}
