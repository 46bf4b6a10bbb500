package telemetry

import (
	"context"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic counts requests by duration, for the recent rate and the 99th percentile in a process's report. Its methods
// are safe for concurrent use. Run owns the windows.
type Traffic struct {
	// counts has the requests of less than trafficUnit << i.
	counts [24]atomic.Uint64

	mu sync.Mutex
	// windows has the counts at the last two ticks, the older first.
	windows [2]window
}

// window is the state of the counts at a time.
type window struct {
	at     time.Time
	counts [24]uint64
}

const (
	// trafficUnit is the upper bound of the first count: the percentile is exact to a factor of two.
	trafficUnit = 128 * time.Microsecond
	// trafficWindow is the interval of ticks. Rates are over 10 to 20 s.
	trafficWindow = 10 * time.Second
)

// Observe counts a request. It costs an atomic addition.
func (t *Traffic) Observe(d time.Duration) {
	t.counts[min(bits.Len64(uint64(max(d, 0)/trafficUnit)), len(t.counts)-1)].Add(1)
}

// Run moves the windows until ctx is done.
func (t *Traffic) Run(ctx context.Context) {
	tick := time.NewTicker(trafficWindow)
	defer tick.Stop()
	for {
		now := t.now()
		t.mu.Lock()
		t.windows[0], t.windows[1] = t.windows[1], now
		t.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (t *Traffic) now() window {
	w := window{at: time.Now()}
	for i := range t.counts {
		w.counts[i] = t.counts[i].Load()
	}
	return w
}

// Recent returns the requests per second, and the 99th percentile of their durations, of the last 10 to 20 s. Both are
// 0 without requests.
func (t *Traffic) Recent() (perSecond float64, p99 time.Duration) {
	now := t.now()
	t.mu.Lock()
	since := t.windows[0]
	if since.at.IsZero() {
		since = t.windows[1]
	}
	t.mu.Unlock()
	total := uint64(0)
	for i := range now.counts {
		now.counts[i] -= since.counts[i]
		total += now.counts[i]
	}
	elapsed := now.at.Sub(since.at)
	if total == 0 || since.at.IsZero() || elapsed <= 0 {
		return 0, 0
	}
	above := total / 100
	for i := len(now.counts) - 1; i >= 0; i-- {
		if above < now.counts[i] {
			return float64(total) / elapsed.Seconds(), trafficUnit << i
		}
		above -= now.counts[i]
	}
	return 0, 0
}
