package telemetry

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Recent covers the last 10 to 20 s: older requests do not count.
func TestRecentTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var traffic Traffic
		if rate, p99 := traffic.Recent(); rate != 0 || p99 != 0 {
			t.Errorf("without a window: %v, %v", rate, p99)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go traffic.Run(ctx)
		synctest.Wait()
		for range 98 {
			traffic.Observe(time.Millisecond)
		}
		traffic.Observe(time.Second)
		traffic.Observe(time.Hour)
		time.Sleep(5 * time.Second)
		if rate, p99 := traffic.Recent(); rate != 20 || p99 < time.Second || p99 > 2*time.Second {
			t.Errorf("%v requests/s, p99 %v", rate, p99)
		}
		time.Sleep(30 * time.Second)
		if rate, p99 := traffic.Recent(); rate != 0 || p99 != 0 {
			t.Errorf("after the windows: %v, %v", rate, p99)
		}
	})
}

func BenchmarkObserve(b *testing.B) {
	var traffic Traffic
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			traffic.Observe(3 * time.Millisecond)
		}
	})
}
