package cache

import (
	"bytes"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"time"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// maxDifferences bounds the differences that wait for their reader.
	maxDifferences = 4
	// minDifferencePause is the pause after a difference has reset a resource, until another may reset it. A reset
	// makes clients list again, so a difference that returns must not reset the resource each time. The pause doubles
	// with each such reset, up to maxDifferencePause. It begins again after twice that time without a reset.
	minDifferencePause = time.Minute
	maxDifferencePause = time.Hour
)

// Difference is a difference of a resource from the publisher's sums, with the resource as it was before the reset.
type Difference struct {
	*Snapshot
	// Objects is true if the objects differ, and false if only the events do, or if the resource is not loaded.
	Objects bool
	// Reset is false if the resource was not reset, because another difference has reset it within differencePause.
	Reset bool
}

// Differences receives each difference. If its reader is behind, further differences are dropped.
func (c *Cache) Differences() <-chan Difference { return c.differences }

// compare compares the sums of the resources' objects and events with the publisher's in a message, if the cache is at
// its position. It resets a resource that differs. Of a complete message, it compares every resource.
func (c *Cache) compare(e *logv1.Event) {
	sums := c.replica.SumsAt(e)
	c.sumsMu.Lock()
	c.sums.Receive(sums, e.Revision)
	c.sumsMu.Unlock()
	if sums.GetComplete() {
		c.each(func(r *Resource) { c.compareResource(r, sums) })
		return
	}
	for name := range sums.GetChanges() {
		c.mu.Lock()
		r := c.resources[name]
		c.mu.Unlock()
		if r != nil {
			c.compareResource(r, sums)
		}
	}
}

// compareResource compares the sums of a resource, and resets the resource if it differs.
func (c *Cache) compareResource(r *Resource, sums *logv1.Sums) {
	s, objects := r.compare(sums)
	if s == nil {
		return
	}
	d := Difference{s, objects, s.ResetDiffering()}
	select {
	case c.differences <- d:
	default:
		slog.Error("A resource differs from the publisher's sums; too many differences wait, so no object is named",
			"resource", r.Name, "revision", d.Revision, "reset", d.Reset)
	}
}

// beginComparison begins the comparison of loaded objects with the publisher's sums, so that the first change after the
// load is compared. If the resource has changed since the last sums, the next sums begin it. The caller holds mu.
func (r *Resource) beginComparison() {
	c := r.cache
	c.sumsMu.Lock()
	defer c.sumsMu.Unlock()
	if term, change, ok := c.sums.Change(r.Name, max(r.applied, r.horizon.Low.Revision)); ok {
		r.checker.Differs(term, change)
	}
}

// compare returns the resource if a sum of its objects or events differs from the publisher's, and nil otherwise. It
// returns a difference again when the resource may be reset. A publisher of an earlier release has no sums of events.
func (r *Resource) compare(sums *logv1.Sums) (s *Snapshot, objects bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	events := len(sums.Events) == len(sums.Changes) && r.eventChecker.Differs(sums.Term, sums.Events[r.Name])
	objects = r.tree != nil && r.checker.Differs(sums.Term, sums.Changes[r.Name])
	if !events && !objects && (!r.differs || time.Since(r.differenceResetAt) < r.differencePause) {
		return nil, false
	}
	s = &Snapshot{resource: r, resets: r.horizon.Resets}
	if r.tree != nil {
		s = r.currentSnapshot("")
	}
	s.Revision = max(r.cache.Progress(), r.applied)
	return s, objects
}

// ResetDiffering resets the snapshot's resource, because the snapshot differs from etcd. Its watches expire, because
// their clients may have wrong objects. ResetDiffering returns false if a difference has reset the resource within
// differencePause, or the objects have been reset since.
func (s *Snapshot) ResetDiffering() bool {
	r := s.resource
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.resets != r.horizon.Resets {
		return false
	}
	since := time.Since(r.differenceResetAt)
	if since < r.differencePause {
		r.differs = true
		return false
	}
	if since > 2*maxDifferencePause {
		r.differencePause = 0
	}
	r.differencePause = min(max(2*r.differencePause, minDifferencePause), maxDifferencePause)
	r.differenceResetAt, r.differedUpTo = time.Now(), max(r.cache.Progress(), r.applied)
	r.differences++
	r.reset(core.Effect{Low: r.differedUpTo})
	r.cache.resets.Add(1)
	return true
}

// Differed returns whether a difference has reset the resource since the subscription began, or at a revision after
// the position of the subscriber.
func (s *Subscription) Differed(revision int64) bool {
	r := s.resource
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.differences != s.differences || revision < r.differedUpTo
}

// Loaded returns the names of the resources that are loaded.
func (c *Cache) Loaded() (names []string) {
	c.each(func(r *Resource) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.tree != nil {
			names = append(names, r.Name)
		}
	})
	return names
}

// Loaded returns the objects if they are loaded. It does not keep them in memory, as Snapshot does for IdleTimeout.
func (r *Resource) Loaded() (*Snapshot, bool) {
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	progress := r.cache.Progress()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tree == nil {
		return nil, false
	}
	s := r.currentSnapshot("")
	s.Revision = max(progress, r.applied)
	return s, true
}

// Resource returns the name of the snapshot's resource.
func (s *Snapshot) Resource() string { return s.resource.Name }

// Items returns the readable objects, in the order of keys.
func (s *Snapshot) Items() iter.Seq[*Item] {
	return func(yield func(*Item) bool) { s.tree.Ascend(yield) }
}

// IsOutdated reports whether the resource has been reset since the snapshot.
func (s *Snapshot) IsOutdated() bool {
	s.resource.mu.Lock()
	defer s.resource.mu.Unlock()
	return s.resets != s.resource.horizon.Resets
}

// DifferenceOf returns the part of the item that differs from etcd's row of the same revision, without its content. It
// is empty if nothing differs. compared is false if the row has no object or another encoder. A packed item stays
// packed.
func (i *Item) DifferenceOf(row *registryv1.Row) (part string, compared bool) {
	json, protobuf := i.json.Load(), i.protobuf.Load()
	if row.Encoder == 0 || row.Encoder != json.encoder {
		return "", false
	}
	var corrupt error
	defer func() {
		if corrupt != nil {
			part, compared = "the compressed object is corrupt", true
		}
	}()
	defer recovery.ToError("unpacking an object", &corrupt)
	etcd := ItemOf(row)
	if i.Version != etcd.Version || !maps.Equal(i.Labels, etcd.Labels) || !maps.Equal(i.fields, etcd.fields) {
		return "version, labels or fields", true
	}
	if at, differs := firstDifference(json.peek(), row.Json); differs {
		return fmt.Sprintf("JSON from byte %d of %d on", at, json.len()), true
	}
	if at, differs := firstDifference(protobuf.peek(), row.Protobuf); differs {
		return fmt.Sprintf("protobuf from byte %d of %d on", at, protobuf.len()), true
	}
	return "", true
}

// firstDifference returns the index of the first byte that differs.
func firstDifference(a, b []byte) (at int, differs bool) {
	if bytes.Equal(a, b) {
		return 0, false
	}
	for at < len(a) && at < len(b) && a[at] == b[at] {
		at++
	}
	return at, true
}
