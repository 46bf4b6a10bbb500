package cache

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Resource is one stored resource's objects and events.
type Resource struct {
	Name  string
	cache *Cache
	// churn counts the bytes of objects that were replaced or deleted: what a snapshot from before keeps alive.
	churn atomic.Int64
	// ringBytes is what the recent events take, and what was made of them: frames, as watches ask for them.
	ringBytes atomic.Int64

	mu       sync.Mutex           // guards what follows
	tree     *btree.BTreeG[*Item] // nil until loaded
	indexes  map[string]*btree.BTreeG[indexed]
	snapshot *Snapshot // of the tree, good until the next change
	bytes    int
	// unreadable are the objects that are there and cannot be read, by key. They are in no tree.
	unreadable map[string]string
	applied    int64 // the newest event's revision

	resetCount    int64 // counts what was forgotten
	events        ring
	low           int64 // events after this revision are all in the ring
	staleEvents   int   // events that topics still hold though the ring has forgotten them
	crdChangedAt  int64 // where the definition last changed
	triggers      map[Trigger]*triggerRing
	triggerFields map[string]int

	subscribers int
	lastUsed    time.Time
	loading     *load
}

type load struct {
	done chan struct{}
	err  error
	// from: what came after it is kept in the ring until the load is done.
	from int64
	// resetCount is the resource's when the load began: what was read before a reset is not of what comes after it.
	resetCount int64
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

// apply takes the events of one transaction.
func (r *Resource) apply(events []*Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		if r.tree != nil {
			r.updateTree(e)
		}
		r.applied = e.Revision
		e.resource = r
		r.events.Add(e)
		r.ringBytes.Add(int64(e.Size()))
		r.dispatchToTriggers(e)
	}
	r.trim(r.bound())
	r.events.changed.Notify()
}

const (
	// idleShare is what part of the ring's bound is kept for a resource that nobody reads.
	idleShare = 16
	// loadShare is how many times the ring's bound may be kept while the resource is being loaded: what came meanwhile
	// belongs to the load.
	loadShare = 8
	// maxStaleEvents is how many events topics may hold beyond the ring before they are gone through.
	maxStaleEvents = 256
)

func (r *Resource) bound() int {
	if r.subscribers == 0 && r.loading == nil && r.cache.IdleTimeout > 0 &&
		time.Since(r.lastUsed) > r.cache.IdleTimeout {
		return r.cache.RingBytes / idleShare
	}
	return r.cache.RingBytes
}

// trim forgets the oldest events beyond the bound; a revision goes whole.
func (r *Resource) trim(bound int) {
	forgotten := 0
	for r.events.Len() > 1 {
		first, over := r.events.Oldest(), r.ringBytes.Load()
		if r.loading != nil && first.Revision > r.loading.from && over <= int64(loadShare*r.cache.RingBytes) {
			break
		}
		if over <= int64(bound) && first.Revision != r.low {
			break
		}
		r.low = first.Revision
		forgotten++
		r.ringBytes.Add(-int64(first.release()))
		r.events.Drop(1)
	}
	if r.staleEvents += forgotten; r.staleEvents > maxStaleEvents {
		r.trimTriggers()
	}
}

// trimTriggers lets topics go of what the ring has forgotten.
func (r *Resource) trimTriggers() {
	for _, t := range r.triggers {
		t.forget(r.low)
	}
	r.staleEvents = 0
}

func (r *Resource) updateTree(e *Event) {
	r.snapshot = nil
	var old *Item
	var had bool
	if e.Type == logv1.Type_TYPE_DELETED {
		old, had = r.tree.Delete(e.Item)
	} else {
		old, had = r.tree.ReplaceOrInsert(e.Item)
		r.bytes += e.Item.Size()
	}
	delete(r.unreadable, e.Item.Key)
	if had {
		r.bytes -= old.Size()
		r.churn.Add(int64(old.Size()))
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
func (r *Resource) drop() {
	r.churn.Add(int64(r.bytes))
	r.tree, r.indexes, r.snapshot, r.bytes, r.unreadable = nil, nil, nil, 0, nil
}

// CRDChangedAt is the revision at which the resource's definition last changed, as far as this replica has seen.
func (r *Resource) CRDChangedAt() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.crdChangedAt
}

// forget forgets everything: there may be a gap before revision.
func (r *Resource) forget(revision int64, crdChanged bool, changedAt int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop()
	r.resetCount++
	for _, e := range r.events.From(r.events.Base()) {
		e.release()
	}
	r.events.reset()
	for _, t := range r.triggers {
		t.reset()
	}
	r.ringBytes.Store(0)
	r.low, r.staleEvents, r.applied = revision, 0, 0
	if crdChanged {
		r.crdChangedAt = changedAt
	}
}

// Snapshot is a resource as it was at one revision.
type Snapshot struct {
	Revision int64
	tree     *btree.BTreeG[*Item]
	indexes  map[string]*btree.BTreeG[indexed]
	// unreadable is shared with the resource's other snapshots, and does not change.
	unreadable map[string]string
	resource   *Resource
	churn      int64
}

// Pinned is about how many bytes of objects only this snapshot keeps alive, and those as old.
func (s *Snapshot) Pinned() int64 { return s.resource.churn.Load() - s.churn }

// Unreadable says why an object whose key begins with prefix cannot be read, if there is one: a list that it belongs to
// has no answer here.
func (s *Snapshot) Unreadable(prefix string) (key, reason string, found bool) {
	for key, reason := range s.unreadable {
		if strings.HasPrefix(key, prefix) {
			return key, reason, true
		}
	}
	return "", "", false
}

// IsUnreadable says whether the object with the key is there and cannot be read.
func (s *Snapshot) IsUnreadable(key string) bool {
	_, found := s.unreadable[key]
	return found
}

// Len is how many objects there are.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get finds one object.
func (s *Snapshot) Get(key string) (*Item, bool) { return s.tree.Get(&Item{Key: key}) }

// Scan calls visit with the objects whose keys begin with prefix, from the key from on, in order, until it returns
// false.
func (s *Snapshot) Scan(prefix, from string, visit func(*Item) bool) {
	s.tree.AscendGreaterOrEqual(&Item{Key: max(prefix, from)}, func(i *Item) bool {
		return strings.HasPrefix(i.Key, prefix) && visit(i)
	})
}

// ScanField is Scan for the objects with a value in a field that the snapshot was asked for with.
func (s *Snapshot) ScanField(t Trigger, prefix, from string, visit func(*Item) bool) {
	index := s.indexes[t.Field]
	if index == nil {
		s.Scan(prefix, from, visit)
		return
	}
	index.AscendGreaterOrEqual(indexed{value: t.Value, key: max(prefix, from)}, func(i indexed) bool {
		return i.value == t.Value && strings.HasPrefix(i.key, prefix) && visit(i.item)
	})
}

// contextCheckInterval is how many objects Select visits before it looks at its context: a selector may have 10,000 terms.
const contextCheckInterval = 64

// Select is ScanField until ctx ends, which is its error.
func (s *Snapshot) Select(ctx context.Context, t Trigger, prefix, from string, visit func(*Item) bool) error {
	visited := 0
	s.ScanField(t, prefix, from, func(i *Item) bool {
		visited++
		return (visited%contextCheckInterval != 0 || ctx.Err() == nil) && visit(i)
	})
	return ctx.Err()
}

// currentSnapshot is the snapshot of what is loaded, with an index for the field, if one is named.
func (r *Resource) currentSnapshot(field string) *Snapshot {
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
		r.snapshot = &Snapshot{
			tree:       r.tree.Clone(),
			unreadable: maps.Clone(r.unreadable),
			resource:   r,
			churn:      r.churn.Load(),
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

// Source reads a whole resource, and answers the revision that it was read at.
type Source func(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error)

// Snapshot is the resource now; it is loaded first if it is not there. A field that is named is indexed.
func (r *Resource) Snapshot(ctx context.Context, field string, source Source,
	wait func(context.Context, int64) error) (*Snapshot, error) {
	for range maxLoads {
		s, l := r.snapshotOrLoad(ctx, field, source, wait)
		if s != nil {
			return s, nil
		}
		select {
		case <-l.done:
			if l.err != nil {
				return nil, l.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, errLoadOverrun
}

// maxLoads is how often a reader waits for the resource to be loaded: more may happen to it than is kept meanwhile.
const maxLoads = 4

var errLoadOverrun = errors.New("more happens to the resource while it is loaded than is kept")

// snapshotOrLoad is the snapshot, or the load under way.
func (r *Resource) snapshotOrLoad(ctx context.Context, field string, source Source,
	wait func(context.Context, int64) error) (*Snapshot, *load) {
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	progress := r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastUsed = time.Now()
	if r.tree != nil {
		s := r.currentSnapshot(field)
		s.Revision = max(progress, r.applied)
		return s, nil
	}
	if r.loading == nil {
		r.loading = &load{done: make(chan struct{}), from: progress, resetCount: r.resetCount}
		go r.load(context.WithoutCancel(ctx), r.loading, source, wait)
	}
	return nil, r.loading
}

// SnapshotAt is the resource as it was at a revision, where it is loaded and has not changed since. It lets a replica
// go on with a list that another one began.
func (r *Resource) SnapshotAt(revision int64) (*Snapshot, bool) {
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	progress := r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tree == nil || revision < r.low || progress < revision || r.applied > revision {
		return nil, false
	}
	s := r.currentSnapshot("")
	s.Revision = revision
	return s, true
}

// loadTimeout bounds the reading of one resource.
const loadTimeout = time.Minute

// load reads a snapshot and adds the events that came after it.
func (r *Resource) load(ctx context.Context, l *load, source Source, wait func(context.Context, int64) error) {
	defer close(l.done)
	tree, unreadable, bytes, revision, err := read(ctx, r.Name, source, wait)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loading = nil
	if err != nil {
		l.err = err
		return
	}
	if r.low > revision || r.resetCount != l.resetCount {
		return // the events after the snapshot are gone from the ring: whoever waits loads again
	}
	r.drop()
	r.tree, r.unreadable, r.bytes = tree, unreadable, bytes
	for _, e := range r.events.From(r.events.Base()) {
		if e.Revision > revision {
			r.updateTree(e)
		}
	}
	r.trim(r.bound())
}

// read reads a whole resource and waits until the log has come to its revision, so that no object is newer than
// Progress.
func read(ctx context.Context, name string, source Source,
	wait func(context.Context, int64) error) (tree *btree.BTreeG[*Item], unreadable map[string]string, bytes int,
	revision int64, err error) {
	defer recovery.ToError("loading "+name, &err)
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	rows, revision, err := source(ctx, name)
	if err == nil {
		err = wait(ctx, revision)
	}
	if err != nil {
		return nil, nil, 0, 0, err
	}
	tree, unreadable = btree.NewG(64, less), map[string]string{}
	for _, row := range rows {
		if row.Unreadable != "" {
			unreadable[Key(row.Namespace, row.Name)] = row.Unreadable
			continue
		}
		i := itemOfRow(row)
		tree.ReplaceOrInsert(i)
		bytes += i.Size()
	}
	return tree, unreadable, bytes, revision, nil
}
