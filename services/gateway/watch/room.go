package watch

import (
	"sync"
	"sync/atomic"
	"time"
)

// Room accounts for the bytes that feeds keep, up to Config.FeedsBytes. Its zero value is ready to use.
type Room struct {
	held atomic.Int64
	// large is how many feeds keep more than keptRecent.
	large atomic.Int64

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

// share is the equal part that a feed with more than keptRecent has of a bound for all, while more than the bound is
// kept: one that keeps less than its part loses nothing to those that keep more. Then all feeds are trimmed, a little
// later. ok is false where there is room.
func (r *Room) share(bound int64) (bytes int, ok bool) {
	if r.held.Load() <= bound {
		return 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.trimming {
		r.trimming = true
		time.AfterFunc(trimAllAfter, r.trim)
	}
	return int(max(keptRecent, bound/max(1, r.large.Load()))), true
}

// hold accounts for bytes that a feed begins or, below 0, ceases to keep beside those that it keeps.
func (r *Room) hold(keeps, n int) {
	switch before, after := keeps > keptRecent, keeps+n > keptRecent; {
	case after && !before:
		r.large.Add(1)
	case before && !after:
		r.large.Add(-1)
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
