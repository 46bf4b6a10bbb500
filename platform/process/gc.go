package process

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// maxAllowance is how much a process that is busy may allocate between two collections whatever lives, in bytes, and
	// minAllowance what it may at first.
	maxAllowance = 48 << 20
	minAllowance = 4 << 20
	// Collections less than closely apart double the room, and those more than seldom apart halve it.
	growBelow   = time.Second
	shrinkAbove = 8 * time.Second
	// goPercent is Go's own pace: the heap may double.
	goPercent = 100
)

// PaceGC lets small heaps of busy processes grow to more than twice their size between collections: by 48 MB,
// while those follow each other within a second. Go lets a heap double: a gateway that has 12 MB alive collects each
// 12 MB that it allocates, several times a second, which is a tenth of its processor time. One that idles keeps its
// small heap, and one whose heap is large Go's pace. Where the environment says GOGC it does nothing; GOMEMLIMIT goes
// before it.
func PaceGC() {
	if !gogcUnset() {
		return
	}
	p := &pacer{last: time.Now(), percent: goPercent, set: func(percent int) { debug.SetGCPercent(percent) }}
	p.wait()
}

// gogcUnset says whether nobody else has said how often to collect.
func gogcUnset() bool {
	_, set := os.LookupEnv("GOGC")
	return !set
}

// pacer is told of each collection.
type pacer struct {
	last      time.Time
	allowance int64 // what may be allocated until the next collection, if Go does not give more
	percent   int
	set       func(percent int)
}

// sentinel dies with each collection. It has a pointer: what has none may share its memory with what lives.
type sentinel struct{ _ *pacer }

// wait has the next collection paced.
func (p *pacer) wait() {
	runtime.AddCleanup(&sentinel{}, func(p *pacer) {
		p.adjust(time.Now(), scanned())
		p.wait()
	}, p)
}

// scanned is what Go lets a heap grow by: what lives there, stacks, and global variables, in bytes.
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

// adjust decides how much may be allocated until the next collection. scanned is what Go would have it be.
func (p *pacer) adjust(now time.Time, scanned int64) {
	switch since := now.Sub(p.last); {
	case since < growBelow:
		p.allowance = min(max(2*p.allowance, minAllowance), maxAllowance)
	case since > shrinkAbove:
		p.allowance /= 2
	}
	p.last = now
	percent := max(goPercent, int(100*p.allowance/max(scanned, 1)))
	if off := percent - p.percent; off > p.percent/8 || -off > p.percent/8 { // each setting takes the heap's lock
		p.percent = percent
		p.set(percent)
	}
}
