package lists

import (
	"cmp"
	"slices"
	"time"

	"watershed.dev/services/watchfanout/cache"
)

// pageSnapshot lets the next page of a list be read at the first page's revision.
type pageSnapshot struct {
	storedAs, history string
	snapshot          *cache.Snapshot
	at                time.Time
}

const (
	keptSnapshots = 64
	keptFor       = 5 * time.Minute
	// keptBytes bounds what kept snapshots hold of objects that are no more, of all resources together. A list whose
	// snapshot is gone goes on from registry.
	keptBytes = 64 << 20
)

func (l *Lists) keep(storedAs, history string, snapshot *cache.Snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.snapshots = slices.DeleteFunc(l.snapshots, func(k pageSnapshot) bool {
		return now.Sub(k.at) >= keptFor || k.storedAs == storedAs && k.snapshot.Revision == snapshot.Revision
	})
	if len(l.snapshots) >= keptSnapshots {
		l.snapshots = slices.Delete(l.snapshots, 0, 1)
	}
	l.snapshots = append(l.snapshots, pageSnapshot{storedAs, history, snapshot, now})
	l.unpin()
}

// unpin forgets the snapshots that hold most that nobody else does, until all of them hold little.
func (l *Lists) unpin() {
	for len(l.snapshots) > 0 {
		pinned := map[string]int64{}
		total := int64(0)
		for _, k := range l.snapshots { // a resource's oldest snapshot pins what the newer ones do
			if p := k.snapshot.Pinned(); p > pinned[k.storedAs] {
				total += p - pinned[k.storedAs]
				pinned[k.storedAs] = p
			}
		}
		if total <= keptBytes {
			return
		}
		worst := slices.MaxFunc(l.snapshots, func(a, b pageSnapshot) int {
			return cmp.Compare(a.snapshot.Pinned(), b.snapshot.Pinned())
		})
		l.snapshots = slices.DeleteFunc(l.snapshots, func(k pageSnapshot) bool { return k.snapshot == worst.snapshot })
	}
}

// Sweep forgets the snapshots that nobody has paged through for long, and compressed runs that nobody has asked for.
func (l *Lists) Sweep() {
	l.runs.forget(runLife)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.snapshots = slices.DeleteFunc(l.snapshots, func(k pageSnapshot) bool { return time.Since(k.at) >= keptFor })
	l.unpin()
}

func (l *Lists) pageAt(storedAs string, revision int64) (*cache.Snapshot, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.snapshots {
		if k.storedAs == storedAs && k.snapshot.Revision == revision && k.history == l.cache.History() {
			return k.snapshot, true
		}
	}
	return nil, false
}
