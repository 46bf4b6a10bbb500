package cache

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/btree"
	"github.com/klauspost/compress/zstd"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchcache/core"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

type load struct {
	done chan struct{}
	err  error
	// from is the cache's revision when the load began. The ring keeps the events after it until the load is done.
	from int64
	// resets is the resource's number of resets when the load began. If a reset happened since, the load is discarded.
	resets int64
}

// Source reads a whole resource. It calls add with each row, from a single goroutine, in the order of etcd's keys:
// neighbours are packed together. It returns the revision of all rows. If it returns an error, the cache drops the
// rows.
type Source func(ctx context.Context, storedAs string, add func(*registryv1.Row)) (revision int64, err error)

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
	if r.loading == nil && (r.tree == nil || len(r.unreadable) > 0 && !r.lastUsed.Before(r.reloadAt)) {
		r.loading = &load{done: make(chan struct{}), from: progress, resets: r.horizon.Resets}
		go r.load(context.WithoutCancel(ctx), r.loading, source, wait)
	}
	if r.tree != nil {
		s := r.currentSnapshot(field)
		s.Revision = max(progress, r.applied)
		return s, nil
	}
	return nil, r.loading
}

// Objects that registry could not decrypt may be readable later without an event: the KMS plugin was unavailable for a
// while. A reader therefore reloads a resource with unreadable objects after minReloadDelay. The delay doubles with
// each load that fails or has unreadable objects, up to maxReloadDelay.
const (
	minReloadDelay = 10 * time.Second
	maxReloadDelay = 5 * time.Minute
)

// delayReload sets when a reader reloads the resource after a load.
func (r *Resource) delayReload() {
	if len(r.unreadable) == 0 {
		r.reloadDelay = 0
		return
	}
	r.reloadDelay = min(max(2*r.reloadDelay, minReloadDelay), maxReloadDelay)
	r.reloadAt = time.Now().Add(r.reloadDelay)
}

// loadTimeout bounds the load of one resource.
const loadTimeout = time.Minute

// load reads a snapshot and applies the events after it. If the resource is loaded, load only adopts the objects that
// were unreadable, and readers use the loaded objects meanwhile.
func (r *Resource) load(ctx context.Context, l *load, source Source, wait func(context.Context, int64) error) {
	defer close(l.done)
	o, revision, err := r.read(ctx, source, wait)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loading = nil
	defer r.delayReload()
	if err != nil {
		l.err = err
		return
	}
	if r.tree != nil {
		r.adopt(&o)
		return
	}
	if !r.horizon.HoldsSince(revision, l.resets) {
		return // the ring has dropped events after the snapshot, so the waiting readers load again
	}
	r.drop()
	r.tree, r.unreadable, r.bytes, r.checker.Sum = o.tree, o.unreadable, o.bytes, o.sum
	r.cache.growth.Add(int64(o.recentBytes))
	r.metrics().loads.Inc()
	for _, e := range r.events.From(r.events.Base()) {
		if e.Revision > revision {
			r.updateTree(e)
		}
	}
	r.beginComparison()
	r.trim()
}

// adopt adds the objects of a later read that are unreadable in the loaded resource, if no event has changed them. All
// other objects stay as the events have made them: a KMS that is unavailable now makes no object unreadable.
func (r *Resource) adopt(o *objects) {
	for key, u := range r.unreadable {
		i, ok := o.tree.Get(&Item{Key: key})
		if !ok || i.Revision != u.revision {
			continue
		}
		delete(r.unreadable, key)
		r.tree.ReplaceOrInsert(i)
		r.bytes, r.snapshot = r.bytes+i.Size(), nil
		for field, index := range r.indexes {
			index.ReplaceOrInsert(indexed{i.Field(field), i.Key, i})
		}
	}
}

// objects are the objects of a resource at a revision.
type objects struct {
	tree       *btree.BTreeG[*Item]
	unreadable map[string]unreadable
	bytes      int
	sum        uint64
	// recent are the objects that add has not packed yet, and recentBytes is their size.
	cache       *Cache
	recent      []*Item
	recentBytes int
	encoder     func() *zstd.Encoder
}

// unreadable is an object that cannot be read, with the reason.
type unreadable struct {
	revision int64
	reason   string
}

// read reads a whole resource. It returns when the log has reached the read's revision, so that no object is newer than
// Progress.
func (r *Resource) read(ctx context.Context, source Source,
	wait func(context.Context, int64) error) (o objects, revision int64, err error) {
	defer recovery.ToError("loading "+r.Name, &err)
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	o = objects{
		tree:       btree.NewG(64, less),
		unreadable: map[string]unreadable{},
		cache:      r.cache,
		encoder:    sync.OnceValue(newEncoder),
	}
	if revision, err = source(ctx, r.Name, o.add); err == nil {
		err = wait(ctx, revision)
	}
	return o, revision, err
}

// add adds a row. If the recent objects have more than maxGrowth bytes, it packs the oldest.
func (o *objects) add(row *registryv1.Row) {
	key := Key(row.Namespace, row.Name)
	o.sum += core.ObjectHash(key, row.Revision)
	if row.Unreadable != "" {
		o.unreadable[key] = unreadable{row.Revision, row.Unreadable}
		return
	}
	i := ItemOf(row)
	o.tree.ReplaceOrInsert(i)
	o.bytes += i.Size()
	o.recent, o.recentBytes = append(o.recent, i), o.recentBytes+i.Size()
	if o.recentBytes > o.cache.maxGrowth {
		o.packOldest()
	}
}

// packOldest packs a sixteenth of maxGrowth: 16 MB take some 40 ms. Longer pauses of a stream's reader would delay the
// other loads of the process. It takes no turns, because many lists that are compressed would delay it too.
func (o *objects) packOldest() {
	n, size := 0, 0
	for ; n < len(o.recent) && size < o.cache.maxGrowth/16; n++ {
		size += o.recent[n].Size()
	}
	o.cache.packItems(o.recent[:n], packer{upTo: lastSerial.Load(), encoder: o.encoder, turn: noTurn})
	clear(o.recent[:n])
	o.recent, o.recentBytes = o.recent[n:], o.recentBytes-size
}
