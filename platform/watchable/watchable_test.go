package watchable

import (
	"sync"
	"testing"
)

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A reader of a value is woken once by the next value.
func TestAValueIsWaitedFor(t *testing.T) {
	var v Value[int]
	got, changed := v.Get()
	if got != 0 || closed(changed) {
		t.Errorf("%d, changed %v", got, closed(changed))
	}
	v.Set(7)
	if !closed(changed) {
		t.Error("Set wakes no goroutine")
	}
	got, changed = v.Get()
	if got != 7 || closed(changed) {
		t.Errorf("%d, changed %v", got, closed(changed))
	}
	v.Update(func(n int) (int, bool) { return n, false })
	if closed(changed) {
		t.Error("an update without a change wakes goroutines")
	}
	v.Update(func(n int) (int, bool) { return n + 1, true })
	if got, _ = v.Get(); got != 8 || !closed(changed) {
		t.Errorf("%d, changed %v", got, closed(changed))
	}
}

// In every race of writers and readers, a reader that waits after each Get finally reads the last value.
func TestNoChangeIsMissed(t *testing.T) {
	var v Value[int]
	var wg sync.WaitGroup
	const last = 1000
	for range 4 {
		wg.Go(func() {
			for {
				n, changed := v.Get()
				if n == last {
					return
				}
				<-changed
			}
		})
	}
	for i := range last {
		v.Set(i + 1)
	}
	wg.Wait()
}
