package process

import (
	"os"
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
		if p.adjust(now, scanned); p.percent != want {
			t.Errorf("%d %%, want %d", p.percent, want)
		}
	}
	after(time.Minute, 8*mb, 100)
	after(time.Second/2, 8*mb, 100) // 4 MB are less than Go gives
	after(time.Second/2, 8*mb, 100)
	after(time.Second/2, 8*mb, 200)
	after(time.Second/2, 8*mb, 400)
	after(time.Second/2, 8*mb, 600) // the maximum
	after(time.Second/2, 8*mb, 600)
	after(2*time.Second, 8*mb, 600)
	after(time.Second/2, 9*mb, 600) // 533 is too small a change
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
	percents := make(chan int)
	p := &pacer{last: time.Now(), percent: goPercent, set: func(percent int) {
		select {
		case percents <- percent:
		case <-t.Context().Done(): // the pacer runs as long as the process
		}
	}}
	p.wait()
	last := goPercent
	for settings := 0; settings < 2; {
		runtime.GC()
		select {
		case percent := <-percents:
			if percent <= last {
				t.Errorf("%d %% after %d", percent, last)
			}
			last = percent
			settings++
		case <-time.After(time.Millisecond): // cleanups run after the collection
			if t.Context().Err() != nil {
				t.Fatal("no collection is paced")
			}
		}
	}
}

func TestGOGCDisablesPacing(t *testing.T) {
	t.Setenv("GOGC", "100")
	if gogcUnset() {
		t.Error("GOGC is set, and the pacer would run")
	}
	if os.Unsetenv("GOGC"); !gogcUnset() {
		t.Error("GOGC is not set, and the pacer would not run")
	}
}
