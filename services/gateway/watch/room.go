package watch

import (
	"sync"
	"sync/atomic"
	"time"
)

// Room accounts for the bytes that feeds keep, up to Config.FeedsBytes. Its zero value is ready to use.
type Room struct {
	held atomic.Int64

	mu    sync.Mutex
	feeds map[*feed]struct{}
	// trimming: all feeds are about to be trimmed.
	trimming bool
}

// trimAllAfter is how long after more than all feeds may keep is kept those are trimmed that have no events of their
// own.
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

// share is how many bytes a feed may keep of a bound for all, where those have come to it: whoever has many feeds that
// are behind takes nothing from those of others. ok is false where there is room.
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
	return int(max(keptRecent, bound/int64(max(1, len(r.feeds))))), true
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
