package watch

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// MemoryQuota accounts for the bytes that feeds keep, up to Config.BroadcastTotalBytes. Its zero value is ready to use.
type MemoryQuota struct {
	used atomic.Int64
	// aboveRetained is how many feeds keep more than retainedBytes, and aboveRetainedUsed how much those keep.
	aboveRetained, aboveRetainedUsed atomic.Int64

	mu         sync.Mutex
	broadcasts map[*watchBroadcast]struct{}
	// trimming: all feeds are about to be trimmed.
	trimming bool
}

// trimAllDelay is how long all feeds together may keep more than their bound before those that no event comes to are
// trimmed too.
const trimAllDelay = time.Second

func (q *MemoryQuota) enter(b *watchBroadcast) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.broadcasts == nil {
		q.broadcasts = map[*watchBroadcast]struct{}{}
	}
	q.broadcasts[b] = struct{}{}
}

func (q *MemoryQuota) leave(b *watchBroadcast) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.broadcasts, b)
}

// share is how many bytes a feed may keep at most, and how many of what every client has seen, by a bound for all.
// While more than the bound is kept, those that keep more than retainedBytes have equal parts of what the others leave,
// which is half of it at least: one that keeps less than its part loses nothing to those that keep more. Then all feeds
// are trimmed, a little later.
func (q *MemoryQuota) share(bound int64) (limit, retained int) {
	used := q.used.Load()
	if used <= bound {
		return math.MaxInt, retainedBytes
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.trimming {
		q.trimming = true
		time.AfterFunc(trimAllDelay, q.trim)
	}
	belowRetained := used - q.aboveRetainedUsed.Load()
	if retained = retainedBytes; belowRetained > bound/2 {
		retained = 0
	}
	return int(max(retainedBytes, max(bound-belowRetained, bound/2)/max(1, q.aboveRetained.Load()))), retained
}

// account accounts for bytes that a feed begins or, below 0, ceases to keep beside those that it keeps.
func (q *MemoryQuota) account(size, n int) {
	if size > retainedBytes {
		q.aboveRetained.Add(-1)
		q.aboveRetainedUsed.Add(-int64(size))
	}
	if size += n; size > retainedBytes {
		q.aboveRetained.Add(1)
		q.aboveRetainedUsed.Add(int64(size))
	}
	broadcastBytes.Set(float64(q.used.Add(int64(n))))
}

// trim trims every feed.
func (q *MemoryQuota) trim() {
	q.mu.Lock()
	broadcasts := make([]*watchBroadcast, 0, len(q.broadcasts))
	for b := range q.broadcasts {
		broadcasts = append(broadcasts, b)
	}
	q.trimming = false
	q.mu.Unlock()
	for _, b := range broadcasts {
		b.mu.Lock()
		b.trim()
		b.mu.Unlock()
	}
}
