// Package cache holds the encoded objects and recent events of every stored resource, or the events only. It handles
// bytes, labels and fields, and no API types. It performs no I/O: callers pass the function that reads a resource.
//
// The goroutine that calls Apply and Restart owns the order of events. Readers are any number of goroutines.
package cache

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchable"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Cache holds every resource of one process. One goroutine applies the log to it; any number of goroutines read it.
//
// Each resource has its own lock. Apply applies an event to its resource before it stores progress. A reader that loads
// progress first and then reads the resource therefore misses no event up to progress.
type Cache struct {
	// RingBytes bounds the bytes of each resource's recent events and their frames.
	RingBytes int
	// IdleTimeout is how long a resource without readers stays in memory; 0 is forever.
	IdleTimeout time.Duration
	// eventsOnly: the cache holds no objects and no frames. RingBytes then bounds the events of all resources together.
	eventsOnly bool

	// reset holds resetMu for writing, so that no reader sees a partial reset.
	resetMu  sync.RWMutex
	progress atomic.Int64
	epoch    atomic.Pointer[string]
	resets   atomic.Int64
	// observed is when the publisher received the newest event, and applied when this replica applied it. Both are
	// nanoseconds since 1970.
	observed, applied atomic.Int64
	// ringBytes is the sum of the resources' ringBytes.
	ringBytes atomic.Int64

	mu        sync.Mutex // guards the fields below
	resources map[string]*Resource
	low       int64 // the horizon of a new resource
	advanced  watchable.Signal

	replica core.Replica // only the applying goroutine uses it

	// packedAt is when packUnchanged last packed. packUpTo is the serial of the newest item at the last call of
	// packOlder. Only the goroutine of Sweep uses them.
	packedAt time.Time
	packUpTo uint64
	// growth has the bytes by which objects have grown since the last call of packOlder. Above maxGrowth, PackGrowth
	// packs.
	growth    atomic.Int64
	maxGrowth int
	unpacked  unpackedPacks

	sumsMu      sync.Mutex // guards sums
	sums        core.TermSums
	differences chan Difference
}

// New returns an empty cache.
func New(ringBytes int, idleTimeout time.Duration) *Cache {
	cachermetrics.Register()
	c := &Cache{
		RingBytes:   ringBytes,
		IdleTimeout: idleTimeout,
		resources:   map[string]*Resource{},
		differences: make(chan Difference, maxDifferences),
		maxGrowth:   maxGrowth,
		unpacked:    unpackedPacks{maxBytes: maxUnpackedBytes},
	}
	c.epoch.Store(new(string))
	return c
}

// NewEvents returns an empty cache of events only: no objects, and no frames of the events. ringBytes bounds the events
// of all resources together, without the newest transaction. The resource with the most bytes loses its events first.
func NewEvents(ringBytes int) *Cache {
	c := New(ringBytes, 0)
	c.eventsOnly = true
	return c
}

// Resource returns a resource's entry, and creates it if it is missing.
func (c *Cache) Resource(name string) *Resource {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, ok := c.resources[name]
	if !ok {
		r = &Resource{
			Name:          name,
			cache:         c,
			horizon:       core.NewHorizon(c.low),
			triggers:      map[Trigger]*triggerRing{},
			triggerFields: map[string]int{},
			lastUsed:      time.Now(),
		}
		c.resources[name] = r
	}
	return r
}

// each calls f for every resource.
func (c *Cache) each(f func(*Resource)) {
	c.mu.Lock()
	all := make([]*Resource, 0, len(c.resources))
	for _, r := range c.resources {
		all = append(all, r)
	}
	c.mu.Unlock()
	for _, r := range all {
		f(r)
	}
}

// Apply applies the log's next event. It applies the events of a transaction together, when the last one arrives.
func (c *Cache) Apply(e *logv1.Event) {
	newest := int64(0) // the bytes of the transaction that is applied
	for _, x := range c.replica.Apply(e) {
		if !x.Expected && x.Events == nil {
			c.resets.Add(1)
		}
		switch {
		case x.Resource == "":
			c.resetAll(x)
		case x.Events == nil:
			c.Resource(x.Resource).forget(x)
		default:
			before := c.ringBytes.Load()
			c.applyTo(x.Resource, x.Events)
			newest += c.ringBytes.Load() - before
			c.applied.Store(time.Now().UnixNano())
		}
	}
	if c.eventsOnly && newest > 0 {
		c.evict(newest)
	}
	if progress := c.replica.Progress; progress > c.progress.Load() {
		c.progress.Store(progress)
		c.notifyAdvanced()
	}
	if e.Sums != nil {
		c.compare(e)
	}
}

// Restart prepares the cache for a reader that starts at the beginning of the log. If the log does not hold the message
// after Progress any longer, its first message resets every resource.
func (c *Cache) Restart() { c.replica.Restart() }

// applyTo applies a transaction's events of one resource. If that fails, it resets the resource, and the next reader
// loads it again.
func (c *Cache) applyTo(name string, events []*logv1.Event) {
	if err := c.tryApply(name, events); err != nil {
		revision := events[0].Revision
		slog.Error("Cannot apply events; resetting their resource", "resource", name, "revision", revision)
		c.Resource(name).forget(core.Effect{Low: max(revision, c.progress.Load())})
		c.resets.Add(1)
	}
}

func (c *Cache) tryApply(name string, events []*logv1.Event) (err error) {
	defer recovery.ToError("applying events", &err)
	batch := make([]*Event, len(events))
	for i, p := range events {
		batch[i] = EventOf(p)
		c.observed.Store(p.ObservedUnixNano)
	}
	c.Resource(name).apply(batch)
	return nil
}

// evict drops the oldest events of the resource with the most bytes until the events before the newest transaction are
// within RingBytes. It never drops the newest transaction, because its watches have not read it.
func (c *Cache) evict(newest int64) {
	for c.ringBytes.Load()-newest > int64(c.RingBytes) {
		var largest *Resource
		bytes := int64(0)
		c.mu.Lock()
		for _, r := range c.resources {
			if n := r.bytesUpTo(c.progress.Load()); n > bytes {
				largest, bytes = r, n
			}
		}
		c.mu.Unlock()
		if largest == nil {
			return
		}
		largest.evictOldest()
	}
}

func (c *Cache) notifyAdvanced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanced.Notify()
}

// resetAll resets every resource.
func (c *Cache) resetAll(x core.Effect) {
	c.resetMu.Lock()
	defer c.resetMu.Unlock()
	c.mu.Lock()
	c.low = x.Low
	c.mu.Unlock()
	c.sumsMu.Lock()
	c.sums = core.TermSums{} // the replica may have missed sums
	c.sumsMu.Unlock()
	epoch := c.replica.Epoch
	c.epoch.Store(&epoch)
	c.progress.Store(x.Low)
	c.each(func(r *Resource) { r.forget(x) })
	c.notifyAdvanced()
}

// Progress returns the revision up to which every event has been applied.
func (c *Cache) Progress() int64 { return c.progress.Load() }

// Epoch returns the epoch of etcd that revisions belong to; empty if the log has not named it. A change of epoch
// overruns every cursor.
func (c *Cache) Epoch() string { return *c.epoch.Load() }

// At returns Epoch and Progress of the same moment.
func (c *Cache) At() (epoch string, progress int64) {
	c.resetMu.RLock()
	defer c.resetMu.RUnlock()
	return c.Epoch(), c.Progress()
}

// Advanced returns a channel that is closed when Progress advances, or all resources are reset.
func (c *Cache) Advanced() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.advanced.C()
}

// Wait waits until every event up to revision has been applied. Between checks it calls requestProgress, which waits
// for advanced or requests a progress message from the publisher.
func (c *Cache) Wait(ctx context.Context, revision int64,
	requestProgress func(ctx context.Context, advanced <-chan struct{})) error {
	for {
		advanced := c.Advanced()
		if c.progress.Load() >= revision {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		requestProgress(ctx, advanced)
	}
}
