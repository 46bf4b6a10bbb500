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

// Resource holds the objects and events of one stored resource. The states of its objects:
//
//	unloaded ── Snapshot ───────────────────────────────► loading
//	loading ─── read, log at the read's revision ───────► loaded
//	loading ─── error, reset, or ring trimmed too far ──► unloaded
//	loaded ──── reset ──────────────────────────────────► unloaded
//	loaded ──── no reader for IdleTimeout (Sweep) ──────► unloaded
//
// In the state unloaded, tree is nil; in the state loading, loading is set. The ring receives events in every state. A
// watch without initial events therefore needs no load.
type Resource struct {
	Name  string
	cache *Cache
	// churn counts the bytes of replaced and deleted objects, which older snapshots keep alive.
	churn atomic.Int64
	// ringBytes counts the bytes of the recent events and of their frames, which watches add.
	ringBytes atomic.Int64

	mu       sync.Mutex           // guards the fields below
	tree     *btree.BTreeG[*Item] // nil until loaded
	indexes  map[string]*btree.BTreeG[indexed]
	snapshot *Snapshot // of the tree; nil after a change
	bytes    int
	// unreadable has the reasons of the objects that cannot be read, by key. They are not in the trees.
	unreadable map[string]string
	applied    int64 // revision of the newest event

	resetCount    int64 // number of resets
	events        ring
	low           int64 // the ring has all events after this revision
	staleEvents   int   // events that triggers still hold after the ring has dropped them
	crdChangedAt  int64 // revision of the last change of the CRD
	triggers      map[Trigger]*triggerRing
	triggerFields map[string]int

	subscribers int
	lastUsed    time.Time
	loading     *load
}

type load struct {
	done chan struct{}
	err  error
	// from is the cache's revision when the load began. The ring keeps the events after it until the load is done.
	from int64
	// resetCount is the resource's when the load began. If a reset happened since, the load is discarded.
	resetCount int64
}

func less(a, b *Item) bool { return a.Key < b.Key }

// indexed is an index entry: an object, ordered by a field's value and by key.
type indexed struct {
	value, key string
	item       *Item
}

func lessIndexed(a, b indexed) bool {
	return a.value < b.value || a.value == b.value && a.key < b.key
}

// maxIndexes bounds the indexed fields of one resource. The first list that selects by a field creates its index.
const maxIndexes = 4

// apply applies the events of one transaction.
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
	// idleShare divides the ring's bound for a resource without readers.
	idleShare = 16
	// loadShare multiplies the ring's bound while the resource is loading, because the load needs the events that
	// arrive meanwhile.
	loadShare = 8
	// maxStaleEvents is the number of dropped events after which trim also trims the triggers.
	maxStaleEvents = 256
)

func (r *Resource) bound() int {
	if r.subscribers == 0 && r.loading == nil && r.cache.IdleTimeout > 0 &&
		time.Since(r.lastUsed) > r.cache.IdleTimeout {
		return r.cache.RingBytes / idleShare
	}
	return r.cache.RingBytes
}

// trim drops the oldest events beyond the bound. It drops all events of a revision together. During a load it keeps the
// events that the load needs, up to loadShare times the ring's bound.
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

// trimTriggers drops the events from the triggers that the ring has dropped.
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

// drop unloads the objects; the next reader loads them again.
func (r *Resource) drop() {
	r.churn.Add(int64(r.bytes))
	r.tree, r.indexes, r.snapshot, r.bytes, r.unreadable = nil, nil, nil, 0, nil
}

// CRDChangedAt returns the revision of the last change of the resource's CRD that this replica has received.
func (r *Resource) CRDChangedAt() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.crdChangedAt
}

// forget resets the resource, because events before revision may be missing. If crdChanged, changedAt is the revision
// of the CRD's change.
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

// Snapshot is a resource at one revision. It does not change.
type Snapshot struct {
	Revision int64
	tree     *btree.BTreeG[*Item]
	indexes  map[string]*btree.BTreeG[indexed]
	// unreadable is shared with other snapshots of the resource, and does not change.
	unreadable map[string]string
	resource   *Resource
	churn      int64
}

// Pinned returns about how many bytes of objects only this snapshot and older ones keep alive.
func (s *Snapshot) Pinned() int64 { return s.resource.churn.Load() - s.churn }

// Unreadable returns an unreadable object whose key begins with prefix, and the reason. The replica cannot serve a list
// that selects the object.
func (s *Snapshot) Unreadable(prefix string) (key, reason string, found bool) {
	for key, reason := range s.unreadable {
		if strings.HasPrefix(key, prefix) {
			return key, reason, true
		}
	}
	return "", "", false
}

// IsUnreadable reports whether the object with the key exists and is unreadable.
func (s *Snapshot) IsUnreadable(key string) bool {
	_, found := s.unreadable[key]
	return found
}

// Len returns the number of readable objects.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get returns the object with a key.
func (s *Snapshot) Get(key string) (*Item, bool) { return s.tree.Get(&Item{Key: key}) }

// Scan calls visit with the objects whose keys begin with prefix, in key order, starting at the key from. It stops if
// visit returns false.
func (s *Snapshot) Scan(prefix, from string, visit func(*Item) bool) {
	s.tree.AscendGreaterOrEqual(&Item{Key: max(prefix, from)}, func(i *Item) bool {
		return strings.HasPrefix(i.Key, prefix) && visit(i)
	})
}

// ScanField is Scan for the objects that match a trigger. It uses the trigger's index. Without an index it scans all
// objects.
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

// contextCheckInterval is the number of objects that Select visits between two checks of its context. A check is needed
// because a selector may have 10,000 terms.
const contextCheckInterval = 64

// Select is ScanField that stops when ctx ends. It then returns ctx's error.
func (s *Snapshot) Select(ctx context.Context, t Trigger, prefix, from string, visit func(*Item) bool) error {
	visited := 0
	s.ScanField(t, prefix, from, func(i *Item) bool {
		visited++
		return (visited%contextCheckInterval != 0 || ctx.Err() == nil) && visit(i)
	})
	return ctx.Err()
}

// currentSnapshot returns a snapshot of the loaded objects. If field is not empty, the snapshot has an index of it,
// unless maxIndexes is reached.
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

// Source reads a whole resource and returns its rows and their revision.
type Source func(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error)

// Snapshot returns the resource at the cache's revision, and loads it first if necessary. If field is not empty, the
// snapshot has an index of it.
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

// maxLoads bounds the loads that a reader waits for. A load fails if the ring drops events that it needs.
const maxLoads = 4

var errLoadOverrun = errors.New("the ring dropped events that loading the resource needed")

// snapshotOrLoad returns the snapshot or, if the resource is not loaded, the load in progress. It starts the load if
// necessary.
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

// SnapshotAt returns the resource at a revision, if it is loaded and has not changed since. A replica can so continue a
// paged list that another replica began.
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

// loadTimeout bounds the load of one resource.
const loadTimeout = time.Minute

// load reads a snapshot and applies the events after it.
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
		return // the ring has dropped events after the snapshot, so the waiting readers load again
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

// read reads a whole resource. It returns when the log has reached the read's revision, so that no object is newer than
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
