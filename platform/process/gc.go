package process

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// maxAllowance bounds the bytes that a busy process may allocate between two collections, if Go's own pace does
	// not allow more. minAllowance is the first allowance.
	maxAllowance = 48 << 20
	minAllowance = 4 << 20
	// The allowance doubles after an interval below growBelow, and halves after an interval above shrinkAbove.
	growBelow   = time.Second
	shrinkAbove = 8 * time.Second
	// goPercent is GOGC's default: the heap may double.
	goPercent = 100
)

// PaceGC lets the small heap of a busy process grow to more than twice its size between collections. It adds up to 48
// MB while collections follow each other within a second. By default Go lets a heap double. A gateway with 12 MB alive
// then collects several times a second, after each 12 MB of allocations. That takes a tenth of its CPU time. An idle
// process keeps its small heap, and a process with a large heap keeps Go's pace. PaceGC does nothing if the
// environment sets GOGC. GOMEMLIMIT takes precedence.
func PaceGC() {
	if !gogcUnset() {
		return
	}
	p := &pacer{last: time.Now(), percent: goPercent, set: func(percent int) { debug.SetGCPercent(percent) }}
	p.wait()
}

// gogcUnset reports if the environment does not set GOGC.
func gogcUnset() bool {
	_, set := os.LookupEnv("GOGC")
	return !set
}

// pacer sets GOGC after each collection. It runs on the goroutine of runtime cleanups.
type pacer struct {
	last      time.Time
	allowance int64 // bytes until the next collection, if Go's pace does not allow more
	percent   int
	set       func(percent int)
}

// sentinel is unreachable, so its cleanup runs after each collection. It has a pointer, because the runtime may place
// objects without pointers in the memory of live objects.
type sentinel struct{ _ *pacer }

// wait calls adjust after the next collection.
func (p *pacer) wait() {
	runtime.AddCleanup(&sentinel{}, func(p *pacer) {
		p.adjust(time.Now(), scanned())
		p.wait()
	}, p)
}

// scanned returns the bytes by which Go lets a heap grow: live heap, stacks, and global variables.
func scanned() (bytes int64) {
	samples := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"},
		{Name: "/gc/scan/stack:bytes"},
		{Name: "/gc/scan/globals:bytes"},
	}
	metrics.Read(samples)
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			bytes += int64(s.Value.Uint64())
		}
	}
	return bytes
}

// adjust sets the allowance until the next collection. scanned is Go's own allowance.
func (p *pacer) adjust(now time.Time, scanned int64) {
	switch since := now.Sub(p.last); {
	case since < growBelow:
		p.allowance = min(max(2*p.allowance, minAllowance), maxAllowance)
	case since > shrinkAbove:
		p.allowance /= 2
	}
	p.last = now
	percent := max(goPercent, int(100*p.allowance/max(scanned, 1)))
	if off := percent - p.percent; off > p.percent/8 || -off > p.percent/8 { // a change locks the heap
		p.percent = percent
		p.set(percent)
	}
}
