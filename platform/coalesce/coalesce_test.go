package coalesce

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Whoever asks while a reading is under way gets the next one, and shares it with all who do.
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
		if len(g.keys) != 0 {
			t.Errorf("%d keys are left", len(g.keys))
		}
	})
}

func TestReadingsAreBoundedAndAPanicIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group[int]{Limit: 2}
		var now, most atomic.Int32
		var wg sync.WaitGroup
		for _, k := range []string{"a", "b", "c", "d", "e"} {
			wg.Go(func() {
				_, err := g.Get(t.Context(), k, func(context.Context) (int, error) {
					most.Store(max(most.Load(), now.Add(1)))
					time.Sleep(time.Second)
					now.Add(-1)
					panic("boom")
				})
				if err == nil {
					t.Error("no error")
				}
			})
		}
		wg.Wait()
		if most.Load() != 2 {
			t.Errorf("%d at a time", most.Load())
		}
	})
}

func TestWhoLeavesIsNotReadFor(t *testing.T) {
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
