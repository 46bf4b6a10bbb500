package cache

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Resource holds the objects and events of one stored resource. The states of its objects:
//
//	unloaded ── Snapshot ───────────────────────────────► loading
//	loading ─── read, log at the read's revision ───────► loaded
//	loading ─── error, reset, or ring trimmed too far ──► unloaded
//	loaded ──── unreadable objects, after reloadDelay ──► loaded; a load adopts those that are readable now
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
	// packed are the sizes of the packs; nil until Sweep has counted them.
	packed   atomic.Pointer[packedSizes]
	counters atomic.Pointer[counters]

	mu       sync.Mutex           // guards the fields below
	tree     *btree.BTreeG[*Item] // nil until loaded
	indexes  map[string]*btree.BTreeG[indexed]
	snapshot *Snapshot // of the tree; nil after a change
	bytes    int
	// unreadable has the objects that cannot be read, by key. They are not in the trees.
	unreadable map[string]unreadable
	// reloadAt is when a reader reloads the resource because it has unreadable objects (delayReload).
	reloadAt    time.Time
	reloadDelay time.Duration
	// checker has the sum of the objects, with the unreadable objects. eventChecker has the sum of the events that the
	// ring has received since the last reset, also of dropped events.
	checker, eventChecker core.SumChecker
	// differenceResetAt is when a difference last reset the resource, differedUpTo the revision then, and differences
	// the number of such resets. differs is true if a difference has not reset it yet. differencePause is the time
	// after differenceResetAt in which no difference resets it again.
	differenceResetAt time.Time
	differencePause   time.Duration
	differedUpTo      int64
	differences       int
	differs           bool
	// applied is the revision of the newest event, and appliedBytes the size of the events of that revision. Only the
	// applying goroutine changes them.
	applied      int64
	appliedBytes int64

	events        ring
	horizon       core.Horizon // of events
	aging         events.Aging // of events
	crdChangedAt  int64        // revision of the last change of the CRD
	triggers      map[Trigger]*triggerRing
	triggerFields map[string]int

	subscribers int
	lastUsed    time.Time
	loading     *load
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

// nodeField has an index beside maxIndexes. kubelets list by it, and kube-apiserver indexes no other field
// (k8s.io/kubernetes/pkg/registry/core/pod/strategy.go).
const nodeField = "spec.nodeName"

// apply applies the events of one transaction.
func (r *Resource) apply(batch []*Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.appliedBytes = 0
	for _, e := range batch {
		if r.tree != nil {
			r.updateTree(e)
		}
		r.applied = e.Revision
		if !r.cache.eventsOnly {
			e.resource = r
		}
		r.events.Add(e)
		r.eventChecker.Sum += core.ObjectHash(e.Item.Key, e.Revision)
		size := int64(e.Size())
		r.appliedBytes += size
		r.addBytes(size)
		r.dispatchToTriggers(e)
	}
	r.trim()
	r.events.notify()
	if c := r.metrics(); c != nil {
		c.received.Add(float64(len(batch)))
		c.dispatched.Add(float64(len(batch)))
	}
}

const (
	// idleShare divides the ring's bound for a resource without readers, and for a ring with old events (eventAge).
	idleShare = 16
	// eventAge is how long events stay at least while the ring is within its bound. They may stay for twice as long, as
	// etcd's revisions do before compaction. kube-apiserver halves its ring if the newest quarter spans over 75 s.
	eventAge = 5 * time.Minute
	// loadShare multiplies the ring's bound while the resource is loading, because the load needs the events that
	// arrive meanwhile.
	loadShare = 8
)

// addBytes adds n to the bytes of the ring.
func (r *Resource) addBytes(n int64) {
	r.ringBytes.Add(n)
	r.cache.ringBytes.Add(n)
}

// bytesUpTo returns the bytes of the events, without the newest transaction if it is after revision. The applying
// goroutine calls it.
func (r *Resource) bytesUpTo(revision int64) int64 {
	if r.applied > revision {
		return r.ringBytes.Load() - r.appliedBytes
	}
	return r.ringBytes.Load()
}

func (r *Resource) bound() core.Bound {
	b := core.Bound{Bytes: int64(r.cache.RingBytes)}
	switch {
	case r.cache.eventsOnly: // evict bounds all rings together
		b.Bytes = math.MaxInt
	case r.loading != nil:
		b.Loading, b.LoadFrom, b.LoadBytes = true, r.loading.from, loadShare*b.Bytes
	case r.subscribers == 0 && r.cache.IdleTimeout > 0 && time.Since(r.lastUsed) > r.cache.IdleTimeout:
		b.Bytes /= idleShare
	}
	return b
}

// trim drops the oldest events beyond the bound.
func (r *Resource) trim() {
	bound := r.bound()
	for r.events.Len() > 1 && r.horizon.MustDrop(r.events.Oldest().Revision, r.ringBytes.Load(), bound) {
		r.dropOldest()
	}
}

// trimOld drops events older than eventAge while the ring exceeds a share of its bound.
func (r *Resource) trimOld(now time.Time) {
	bound, old := r.bound(), r.aging.Old(now, eventAge, r.events.Next())
	bound.Bytes = min(bound.Bytes, int64(r.cache.RingBytes/idleShare))
	for r.events.Len() > 1 && r.events.Base() < old &&
		r.horizon.MustDrop(r.events.Oldest().Revision, r.ringBytes.Load(), bound) {
		r.dropOldest()
	}
}

// dropOldest drops the oldest event, also from its triggers.
func (r *Resource) dropOldest() {
	e := r.events.Oldest()
	r.horizon.Low = e.At()
	r.eachTrigger(e, func(t *triggerRing) { t.forget(r.horizon.Low) })
	r.addBytes(-int64(e.release()))
	r.events.Drop(1)
}

// evictOldest drops the events of the oldest revision.
func (r *Resource) evictOldest() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for first := r.events.Oldest().Revision; r.events.Len() > 0 && r.events.Oldest().Revision == first; {
		r.dropOldest()
	}
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
		grown := e.Item.Size()
		if had && !old.Packed() { // its bytes are free once the ring drops it
			grown -= old.Size()
		}
		r.cache.growth.Add(int64(max(0, grown)))
	}
	if u, found := r.unreadable[e.Item.Key]; found {
		delete(r.unreadable, e.Item.Key)
		r.checker.Sum -= core.ObjectHash(e.Item.Key, u.revision)
	}
	if e.Type != logv1.Type_TYPE_DELETED {
		r.checker.Sum += core.ObjectHash(e.Item.Key, e.Item.Revision)
	}
	if had {
		r.checker.Sum -= core.ObjectHash(old.Key, old.Revision)
		r.bytes -= old.Size()
		r.churn.Add(int64(old.Size()))
	}
	for field, index := range r.indexes {
		if had {
			index.Delete(indexed{value: old.Field(field), key: old.Key})
		}
		if e.Type != logv1.Type_TYPE_DELETED {
			index.ReplaceOrInsert(indexed{e.Item.Field(field), e.Item.Key, e.Item})
		}
	}
}

// drop unloads the objects; the next reader loads them again. A difference that has not reset the resource stays,
// because watches may have missed an event.
func (r *Resource) drop() {
	r.churn.Add(int64(r.bytes))
	r.tree, r.indexes, r.snapshot, r.bytes, r.unreadable = nil, nil, nil, 0, nil
	r.checker = core.SumChecker{}
}

// CRDChangedAt returns the revision of the last change of the resource's CRD that this replica has received.
func (r *Resource) CRDChangedAt() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.crdChangedAt
}

// forget resets the resource.
func (r *Resource) forget(x core.Effect) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reset(x)
}

// reset is forget for a caller that holds mu.
func (r *Resource) reset(x core.Effect) {
	r.drop()
	r.horizon.Reset(x.Low)
	for _, e := range r.events.From(r.events.Base()) {
		e.release()
	}
	r.events.reset()
	for _, t := range r.triggers {
		t.reset()
	}
	r.addBytes(-r.ringBytes.Load())
	r.applied, r.appliedBytes, r.eventChecker, r.differs = 0, 0, core.SumChecker{}, false
	if x.CRDChanged {
		r.crdChangedAt = x.CRDChangedAt
	}
}
