package watch

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Room accounts for the bytes that feeds keep, up to Config.FeedsBytes. Its zero value is ready to use.
type Room struct {
	held atomic.Int64
	// large is how many feeds keep more than keptRecent, and largeHeld how much those keep.
	large, largeHeld atomic.Int64

	mu    sync.Mutex
	feeds map[*feed]struct{}
	// trimming: all feeds are about to be trimmed.
	trimming bool
}

// trimAllAfter is how long all feeds together may keep more than their bound before those that no event comes to are
// trimmed too.
const trimAllAfter = time.Second

func (r *Room) enter(f *feed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.feeds == nil {
		r.feeds = map[*feed]struct{}{}
	}
	r.feeds[f] = struct{}{}
}

func (r *Room) leave(f *feed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.feeds, f)
}

// share is how many bytes a feed may keep at most, and how many of what every client has seen, by a bound for all.
// While more than the bound is kept, those that keep more than keptRecent have equal parts of what the others leave,
// which is half of it at least: one that keeps less than its part loses nothing to those that keep more. Then all feeds
// are trimmed, a little later.
func (r *Room) share(bound int64) (most, recent int) {
	held := r.held.Load()
	if held <= bound {
		return math.MaxInt, keptRecent
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.trimming {
		r.trimming = true
		time.AfterFunc(trimAllAfter, r.trim)
	}
	small := held - r.largeHeld.Load()
	if recent = keptRecent; small > bound/2 {
		recent = 0
	}
	return int(max(keptRecent, max(bound-small, bound/2)/max(1, r.large.Load()))), recent
}

// hold accounts for bytes that a feed begins or, below 0, ceases to keep beside those that it keeps.
func (r *Room) hold(keeps, n int) {
	if keeps > keptRecent {
		r.large.Add(-1)
		r.largeHeld.Add(-int64(keeps))
	}
	if keeps += n; keeps > keptRecent {
		r.large.Add(1)
		r.largeHeld.Add(int64(keeps))
	}
	feedBytes.Set(float64(r.held.Add(int64(n))))
}

// trim trims every feed.
func (r *Room) trim() {
	r.mu.Lock()
	all := make([]*feed, 0, len(r.feeds))
	for f := range r.feeds {
		all = append(all, f)
	}
	r.trimming = false
	r.mu.Unlock()
	for _, f := range all {
		f.mu.Lock()
		f.trim()
		f.mu.Unlock()
	}
}
