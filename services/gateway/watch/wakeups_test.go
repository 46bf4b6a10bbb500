package watch

import (
	"math/rand"
	"testing"
	"testing/synctest"
	"time"
)

// A watch wakes once, at the time that was set last, unless that time is cleared. A time in the past wakes it at once.
func TestWakeups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewSource(1))
		var s wakeups
		began := time.Now()
		want := map[*clientWatch]int{} // seconds since began
		var all []*clientWatch
		set := func(w *clientWatch, second int) {
			want[w] = max(0, second)
			s.set(w, began.Add(time.Duration(second)*time.Second))
		}
		for i := range 200 {
			w := &clientWatch{woken: make(chan struct{}, 1)}
			all = append(all, w)
			for range i % 3 {
				set(w, 1+r.Intn(100)) // not in the past, which could wake it before the next call
			}
			if i%4 == 0 {
				set(w, 1+r.Intn(100))
				s.clear(w)
				delete(want, w)
			} else {
				set(w, r.Intn(110)-10)
			}
		}
		for second := range 200 {
			synctest.Wait()
			for i, w := range all {
				woken := false
				select {
				case <-w.woken:
					woken = true
				default:
				}
				at, ok := want[w]
				if due := ok && at == second; woken != due {
					t.Fatalf("watch %d is awake at %d s: %v, want %v", i, second, woken, due)
				}
				if delete(want, w); woken && second < 100 && i%5 == 0 { // as after the last bookmark
					set(w, second+1+r.Intn(50))
				} else if ok && !woken {
					want[w] = at
				}
			}
			time.Sleep(time.Second) // the clock of synctest
		}
		if len(s.heap) != 0 {
			t.Errorf("%d times are left", len(s.heap))
		}
	})
}
