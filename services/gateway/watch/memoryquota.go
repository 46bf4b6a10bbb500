package watch

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// MemoryQuota accounts for the bytes that broadcasts hold, up to Config.BroadcastTotalBytes. Its zero value is ready to
// use.
type MemoryQuota struct {
	used atomic.Int64
	// aboveRetained is the number of broadcasts that hold more than retainedBytes, and aboveRetainedUsed their size.
	aboveRetained, aboveRetainedUsed atomic.Int64

	mu         sync.Mutex
	broadcasts map[*watchBroadcast]struct{}
	// trimming: trim of all broadcasts is scheduled.
	trimming bool
}

// trimAllDelay is how long the broadcasts may exceed their quota before idle broadcasts are trimmed too.
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

// share returns how many bytes a broadcast may hold, and how many bytes that all receivers have seen, for a quota of
// `bound` bytes. When the quota is exceeded, broadcasts above retainedBytes share the remaining bytes equally, at least
// half of the quota. Small broadcasts are not trimmed for large broadcasts. share then schedules trim for all of them.
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

// account adds n bytes to a broadcast that holds `size` bytes. n is negative for dropped entries.
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

// trim trims every broadcast.
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
		b.trim(time.Now())
		b.mu.Unlock()
	}
}
