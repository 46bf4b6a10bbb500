package cache

import (
	"context"
	"maps"
	"strings"

	"github.com/google/btree"
)

// Snapshot is a resource at one revision. It does not change.
type Snapshot struct {
	Revision int64
	tree     *btree.BTreeG[*Item]
	indexes  map[string]*btree.BTreeG[indexed]
	// unreadable is shared with other snapshots of the resource, and does not change.
	unreadable map[string]unreadable
	resource   *Resource
	churn      int64
	// resets is the resource's number of resets.
	resets int64
}

// Pinned returns about how many bytes of objects only this snapshot and older ones keep alive.
func (s *Snapshot) Pinned() int64 { return s.resource.churn.Load() - s.churn }

// Unreadable returns an unreadable object whose key begins with prefix, and the reason. The replica cannot serve a list
// that selects the object.
func (s *Snapshot) Unreadable(prefix string) (key, reason string, found bool) {
	for key, u := range s.unreadable {
		if strings.HasPrefix(key, prefix) {
			return key, u.reason, true
		}
	}
	return "", "", false
}

// IsUnreadable reports whether the object with the key exists and is unreadable.
func (s *Snapshot) IsUnreadable(key string) bool {
	_, found := s.unreadable[key]
	return found
}

// UnreadableReason returns why the object with the key is unreadable. It is empty for other keys.
func (s *Snapshot) UnreadableReason(key string) string { return s.unreadable[key].reason }

// Len returns the number of readable objects.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get returns the object with a key.
func (s *Snapshot) Get(key string) (*Item, bool) { return s.tree.Get(&Item{Key: key}) }

// scan calls visit with the objects whose keys begin with prefix, in key order, starting at the key from. It stops if
// visit returns false.
func (s *Snapshot) scan(prefix, from string, visit func(*Item) bool) {
	s.tree.AscendGreaterOrEqual(&Item{Key: max(prefix, from)}, func(i *Item) bool {
		return strings.HasPrefix(i.Key, prefix) && visit(i)
	})
}

// scanField is scan for the objects that match a trigger. It uses the trigger's index. Without an index it scans all
// objects.
func (s *Snapshot) scanField(t Trigger, prefix, from string, visit func(*Item) bool) {
	index := s.indexes[t.Field]
	if index == nil {
		s.scan(prefix, from, visit)
		return
	}
	index.AscendGreaterOrEqual(indexed{value: t.Value, key: max(prefix, from)}, func(i indexed) bool {
		return i.value == t.Value && strings.HasPrefix(i.key, prefix) && visit(i.item)
	})
}

// contextCheckInterval is the number of objects that Select visits between two checks of its context. A check is needed
// because a selector may have 10,000 terms.
const contextCheckInterval = 64

// Select is scanField that stops when ctx ends. It then returns ctx's error.
func (s *Snapshot) Select(ctx context.Context, t Trigger, prefix, from string, visit func(*Item) bool) error {
	visited := 0
	s.scanField(t, prefix, from, func(i *Item) bool {
		visited++
		return (visited%contextCheckInterval != 0 || ctx.Err() == nil) && visit(i)
	})
	return ctx.Err()
}

// currentSnapshot returns a snapshot of the loaded objects. If field is not empty, the snapshot has an index of it,
// unless maxIndexes is reached.
func (r *Resource) currentSnapshot(field string) *Snapshot {
	if field != "" && r.indexes[field] == nil && (field == nodeField || len(r.indexes) < maxIndexes) {
		index := btree.NewG(64, lessIndexed)
		r.tree.Ascend(func(i *Item) bool {
			index.ReplaceOrInsert(indexed{i.Field(field), i.Key, i})
			return true
		})
		if r.indexes == nil {
			r.indexes = map[string]*btree.BTreeG[indexed]{}
		}
		r.indexes[field] = index
		r.snapshot = nil
	}
	if r.snapshot == nil {
		r.snapshot = &Snapshot{
			tree:       r.tree.Clone(),
			unreadable: maps.Clone(r.unreadable),
			resource:   r,
			churn:      r.churn.Load(),
			resets:     r.horizon.Resets,
		}
		for f, index := range r.indexes {
			if r.snapshot.indexes == nil {
				r.snapshot.indexes = map[string]*btree.BTreeG[indexed]{}
			}
			r.snapshot.indexes[f] = index.Clone()
		}
	}
	s := *r.snapshot
	return &s
}

// SnapshotAt returns the resource at a revision, if it is loaded and has not changed since. A replica can so continue a
// paged list that another replica began.
func (r *Resource) SnapshotAt(revision int64) (*Snapshot, bool) {
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	progress := r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tree == nil || revision < r.horizon.Low.Revision || progress < revision || r.applied > revision {
		return nil, false
	}
	s := r.currentSnapshot("")
	s.Revision = revision
	return s, true
}
