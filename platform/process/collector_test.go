package process

import (
	"runtime"
	"testing"
	"time"
)

const mb = 1 << 20

func TestABusyProcessWithASmallHeapCollectsLessOften(t *testing.T) {
	now := time.Unix(0, 0)
	set := 0
	p := &pacer{last: now, percent: goPercent, set: func(int) { set++ }}
	after := func(d time.Duration, scanned int64, want int) {
		t.Helper()
		now = now.Add(d)
		if p.collected(now, scanned); p.percent != want {
			t.Errorf("%d %%, want %d", p.percent, want)
		}
	}
	after(time.Minute, 8*mb, 100)
	after(time.Second/2, 8*mb, 100) // 4 MB are less than Go gives
	after(time.Second/2, 8*mb, 100)
	after(time.Second/2, 8*mb, 200)
	after(time.Second/2, 8*mb, 400)
	after(time.Second/2, 8*mb, 600) // and no more
	after(time.Second/2, 8*mb, 600)
	after(2*time.Second, 8*mb, 600)
	after(time.Second/2, 9*mb, 600) // 533 is no reason to stop the world
	after(time.Second/2, 24*mb, 200)
	after(time.Second/2, 100*mb, 100)
	after(10*time.Second, 8*mb, 300)
	after(10*time.Second, 8*mb, 150)
	after(10*time.Second, 8*mb, 100)
	if set != 8 {
		t.Errorf("set %d times", set)
	}
}

func TestEachCollectionIsPaced(t *testing.T) {
	told := make(chan int, 16)
	p := &pacer{last: time.Now(), percent: goPercent, set: func(percent int) { told <- percent }}
	p.wait()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		runtime.GC()
		select {
		case percent := <-told:
			if percent <= goPercent {
				t.Errorf("%d %%", percent)
			}
			return
		case <-time.After(time.Millisecond): // cleanups run after the collection
		}
	}
	t.Error("nobody is told of collections")
}
