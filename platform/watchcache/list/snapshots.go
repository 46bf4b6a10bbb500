package list

import (
	"cmp"
	"slices"
	"time"

	"watershed.dev/platform/watchcache/cache"
)

// pageSnapshot is the snapshot from which the next pages of a list are read, at the first page's revision.
type pageSnapshot struct {
	storageResource, epoch string
	snapshot               *cache.Snapshot
	createdAt              time.Time
	// counts has the number of objects from the start of a next page on. With its count, a page visits only its own
	// objects.
	counts map[pageStart]int64
}

// pageStart is the first key that a page may have, and the prefix of all keys of its list.
type pageStart struct{ prefix, from string }

const (
	maxSnapshots = 64
	snapshotTTL  = 5 * time.Minute
	// maxPinnedBytes bounds the bytes of replaced and deleted objects that cached snapshots keep alive, for all
	// resources together. registry continues a list whose snapshot is gone.
	maxPinnedBytes = 64 << 20
	// maxCounts bounds the counts of a snapshot. Each list that is being paged needs a count. A further list empties
	// them, and the next pages count again.
	maxCounts = 16
)

// putSnapshot caches the snapshot of a list whose next page begins at next. count is the number of objects from there
// on, or unknownCount.
func (l *Server) putSnapshot(storageResource, epoch string, snapshot *cache.Snapshot, next pageStart, count int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	counts := map[pageStart]int64{}
	l.snapshots = slices.DeleteFunc(l.snapshots, func(k pageSnapshot) bool {
		same := k.storageResource == storageResource && k.snapshot.Revision == snapshot.Revision
		if same && k.epoch == epoch && len(k.counts) < maxCounts {
			counts = k.counts
		}
		return same || now.Sub(k.createdAt) >= snapshotTTL
	})
	if count != unknownCount {
		counts[next] = count
	}
	if len(l.snapshots) >= maxSnapshots {
		l.snapshots = slices.Delete(l.snapshots, 0, 1)
	}
	l.snapshots = append(l.snapshots, pageSnapshot{storageResource, epoch, snapshot, now, counts})
	l.unpin()
}

// unpin drops the snapshots that pin most until all of them together pin at most maxPinnedBytes.
func (l *Server) unpin() {
	for len(l.snapshots) > 0 {
		pinned := map[string]int64{}
		total := int64(0)
		for _, k := range l.snapshots { // a resource's oldest snapshot pins all that its newer ones pin
			if p := k.snapshot.Pinned(); p > pinned[k.storageResource] {
				total += p - pinned[k.storageResource]
				pinned[k.storageResource] = p
			}
		}
		if total <= maxPinnedBytes {
			return
		}
		worst := slices.MaxFunc(l.snapshots, func(a, b pageSnapshot) int {
			return cmp.Compare(a.snapshot.Pinned(), b.snapshot.Pinned())
		})
		l.snapshots = slices.DeleteFunc(l.snapshots, func(k pageSnapshot) bool { return k.snapshot == worst.snapshot })
	}
}

// Sweep drops expired snapshots and compressed runs without requests.
func (l *Server) Sweep() {
	l.runs.forget(runTTL)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.snapshots = slices.DeleteFunc(
		l.snapshots,
		func(k pageSnapshot) bool { return time.Since(k.createdAt) >= snapshotTTL },
	)
	l.unpin()
}

// unknownCount is the number of objects that must be counted.
const unknownCount = -1

// countFrom returns the number of objects of a list from the start of a page on, or unknownCount.
func (l *Server) countFrom(storageResource string, snapshot *cache.Snapshot, start pageStart) int64 {
	if start == (pageStart{}) {
		return int64(snapshot.Len())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.snapshots {
		if count, ok := k.counts[start]; ok && k.storageResource == storageResource &&
			k.snapshot.Revision == snapshot.Revision && k.epoch == l.cache.Epoch() {
			delete(k.counts, start) // the page puts the count of the next page
			return count
		}
	}
	return unknownCount
}

func (l *Server) cachedSnapshot(storageResource string, revision int64) (*cache.Snapshot, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.snapshots {
		if k.storageResource == storageResource && k.snapshot.Revision == revision && k.epoch == l.cache.Epoch() {
			return k.snapshot, true
		}
	}
	return nil, false
}
