package cache

import (
	"context"
	"strings"
	"time"

	"github.com/google/btree"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Resource is one stored resource's objects and events, all guarded by the cache's lock.
type Resource struct {
	Name  string
	cache *Cache

	tree     *btree.BTreeG[*Item] // nil until loaded
	indexes  map[string]*btree.BTreeG[indexed]
	snapshot *Snapshot // of the tree, good until the next change
	bytes    int

	all         ring
	ringBytes   int
	low         int64 // events after this revision are all in the ring
	redefined   int64 // where the definition last changed
	topics      map[Topic]*topic
	topicFields map[string]int

	followers int
	used      time.Time
	loading   *load
}

type load struct {
	done chan struct{}
	err  error
}

func less(a, b *Item) bool { return a.Key < b.Key }

// indexed is an object's place among those with the same value in a field.
type indexed struct {
	value, key string
	item       *Item
}

func lessIndexed(a, b indexed) bool {
	return a.value < b.value || a.value == b.value && a.key < b.key
}

// maxIndexes bounds the fields of one resource that are indexed; they are indexed when they are first selected by.
const maxIndexes = 4

func (r *Resource) apply(e *Event) {
	if r.tree != nil {
		r.change(e)
	}
	r.all.add(e)
	r.ringBytes += e.Item.Size()
	r.publish(e)
	r.trim(r.bound())
	r.all.notify()
}

// idleShare is what part of the ring's bound is kept for a resource that nobody reads.
const idleShare = 16

func (r *Resource) bound() int {
	if r.followers == 0 && r.cache.IdleAfter > 0 && time.Since(r.used) > r.cache.IdleAfter {
		return r.cache.RingBytes / idleShare
	}
	return r.cache.RingBytes
}

// trim forgets the oldest events beyond the bound; a revision goes whole.
func (r *Resource) trim(bound int) {
	forgotten := false
	for n := len(r.all.events); n > 1 && (r.ringBytes > bound || r.all.events[0].Revision == r.low); n-- {
		first := r.all.events[0]
		r.low, forgotten = first.Revision, true
		r.ringBytes -= first.Item.Size()
		r.all.events[0] = nil
		r.all.events = r.all.events[1:]
		r.all.base++
	}
	if forgotten {
		for _, t := range r.topics {
			t.forget(r.low)
		}
	}
}

func (r *Resource) change(e *Event) {
	r.snapshot = nil
	var old *Item
	var had bool
	if e.Type == logv1.Type_TYPE_DELETED {
		old, had = r.tree.Delete(e.Item)
	} else {
		old, had = r.tree.ReplaceOrInsert(e.Item)
		r.bytes += e.Item.Size()
	}
	if had {
		r.bytes -= old.Size()
	}
	for field, index := range r.indexes {
		if had {
			index.Delete(indexed{value: old.Fields[field], key: old.Key})
		}
		if e.Type != logv1.Type_TYPE_DELETED {
			index.ReplaceOrInsert(indexed{e.Item.Fields[field], e.Item.Key, e.Item})
		}
	}
}

// drop forgets the objects; the next reader brings them back.
func (r *Resource) drop() { r.tree, r.indexes, r.snapshot, r.bytes = nil, nil, nil, 0 }

// Redefined is the revision at which the resource's definition last changed, as far as this replica has seen.
func (r *Resource) Redefined() int64 {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	return r.redefined
}

// reset forgets everything: there may be a gap before revision.
func (r *Resource) reset(revision int64) {
	r.drop()
	r.all.reset()
	for _, t := range r.topics {
		t.reset()
	}
	r.ringBytes, r.low = 0, revision
}

// Snapshot is a resource as it was at one revision.
type Snapshot struct {
	Revision int64
	tree     *btree.BTreeG[*Item]
	indexes  map[string]*btree.BTreeG[indexed]
}

// Len is how many objects there are.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get finds one object.
func (s *Snapshot) Get(key string) (*Item, bool) { return s.tree.Get(&Item{Key: key}) }

// Scan calls visit with the objects whose keys begin with prefix, from the key from on, in order, until it returns false.
func (s *Snapshot) Scan(prefix, from string, visit func(*Item) bool) {
	s.tree.AscendGreaterOrEqual(&Item{Key: max(prefix, from)}, func(i *Item) bool {
		return strings.HasPrefix(i.Key, prefix) && visit(i)
	})
}

// ScanField is Scan for the objects with a value in a field that the snapshot was asked for with.
func (s *Snapshot) ScanField(t Topic, prefix, from string, visit func(*Item) bool) {
	index := s.indexes[t.Field]
	if index == nil {
		s.Scan(prefix, from, visit)
		return
	}
	index.AscendGreaterOrEqual(indexed{value: t.Value, key: max(prefix, from)}, func(i indexed) bool {
		return i.value == t.Value && strings.HasPrefix(i.key, prefix) && visit(i.item)
	})
}

// now is the snapshot of what is loaded, with an index for the field, if one is named.
func (r *Resource) now(field string) *Snapshot {
	if field != "" && r.indexes[field] == nil && len(r.indexes) < maxIndexes {
		index := btree.NewG(64, lessIndexed)
		r.tree.Ascend(func(i *Item) bool {
			index.ReplaceOrInsert(indexed{i.Fields[field], i.Key, i})
			return true
		})
		if r.indexes == nil {
			r.indexes = map[string]*btree.BTreeG[indexed]{}
		}
		r.indexes[field] = index
		r.snapshot = nil
	}
	if r.snapshot == nil {
		r.snapshot = &Snapshot{tree: r.tree.Clone()}
		for f, index := range r.indexes {
			if r.snapshot.indexes == nil {
				r.snapshot.indexes = map[string]*btree.BTreeG[indexed]{}
			}
			r.snapshot.indexes[f] = index.Clone()
		}
	}
	r.used = time.Now()
	s := *r.snapshot
	return &s
}

// Source reads a whole resource, and answers the revision that it was read at.
type Source func(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error)

// Snapshot is the resource now; it is loaded first if it is not there. A field that is named is indexed.
func (r *Resource) Snapshot(ctx context.Context, field string, source Source, wait func(context.Context, int64) error) (*Snapshot, error) {
	for {
		r.cache.mu.Lock()
		if r.tree != nil {
			s := r.now(field)
			s.Revision = r.cache.progress
			r.cache.mu.Unlock()
			return s, nil
		}
		l := r.loading
		if l == nil {
			l = &load{done: make(chan struct{})}
			r.loading = l
			go r.load(context.WithoutCancel(ctx), l, source, wait)
		}
		r.cache.mu.Unlock()
		select {
		case <-l.done:
			if l.err != nil {
				return nil, l.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// SnapshotAt is the resource as it was at a revision, where it is loaded and has not changed since. It lets a replica go on
// with a list that another one began.
func (r *Resource) SnapshotAt(revision int64) (*Snapshot, bool) {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	if r.tree == nil || revision < r.low || r.cache.progress < revision {
		return nil, false
	}
	if n := len(r.all.events); n > 0 && r.all.events[n-1].Revision > revision {
		return nil, false
	}
	s := r.now("")
	s.Revision = revision
	return s, true
}

// loadTimeout bounds the reading of one resource.
const loadTimeout = time.Minute

// load reads a snapshot and adds the events that came after it.
func (r *Resource) load(ctx context.Context, l *load, source Source, wait func(context.Context, int64) error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	rows, revision, err := source(ctx, r.Name)
	if err == nil {
		err = wait(ctx, revision) // the log must have passed the snapshot, lest the cache be newer than it says
	}
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	defer close(l.done)
	r.loading = nil
	if err != nil {
		l.err = err
		return
	}
	if r.low > revision {
		return // the events after the snapshot are gone from the ring: whoever waits loads again
	}
	r.drop()
	r.tree = btree.NewG(64, less)
	for _, row := range rows {
		i := itemOfRow(row)
		r.tree.ReplaceOrInsert(i)
		r.bytes += i.Size()
	}
	for _, e := range r.all.events {
		if e.Revision > revision {
			r.change(e)
		}
	}
}
