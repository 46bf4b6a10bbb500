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

	"watershed.dev/platform/events"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchable"
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
	low       int64
	started   bool
	advanced  watchable.Signal

	pending []*logv1.Event // events of an open transaction; only the applying goroutine uses it
}

// New returns an empty cache.
func New(ringBytes int, idleTimeout time.Duration) *Cache {
	c := &Cache{RingBytes: ringBytes, IdleTimeout: idleTimeout, resources: map[string]*Resource{}}
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
			low:           c.low,
			lowIndex:      events.LastIndex,
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

// Apply applies the log's next message. It applies the events of a transaction together, when the last one arrives.
func (c *Cache) Apply(e *logv1.Event) {
	switch {
	case e.Type == logv1.Type_TYPE_RESET && e.StorageResource != "" && c.hasStarted():
		if e.Revision < c.progress.Load() { // a duplicate
			return
		}
		c.applyPending() // a reset of one resource is ordered among the events
		c.Resource(e.StorageResource).forget(e.Revision, e.CrdChanged, e.Revision)
		if !e.CrdChanged {
			c.resets.Add(1)
		}
		if !e.More {
			c.advance(e.Revision)
		}
		return
	case events.IsRefill(e, *c.epoch.Load(), c.progress.Load()):
		c.pending = nil // the refilled log repeats an open transaction from its start
		c.mu.Lock()
		c.started = true
		c.mu.Unlock()
		return
	case e.Type == logv1.Type_TYPE_RESET:
		c.reset(e.Revision, e.Epoch)
		c.resets.Add(1)
		return
	case e.Epoch != "" && *c.epoch.Load() != "" && e.Epoch != *c.epoch.Load():
		c.reset(e.Revision, e.Epoch) // a new log whose first messages are gone
		c.resets.Add(1)
	case !c.hasStarted():
		c.start(e)
	}
	if e.Type == logv1.Type_TYPE_UNSPECIFIED {
		c.advance(e.Revision)
		return
	}
	if e.Revision <= c.progress.Load() { // a duplicate: the log lost its end, and the publisher wrote it again
		return
	}
	n := len(c.pending)
	for n > 0 && !events.PositionOf(c.pending[n-1]).Before(events.PositionOf(e)) {
		n-- // the publisher begins the transaction again
	}
	c.pending = c.pending[:n]
	c.pending = append(c.pending, e)
	if e.More {
		return
	}
	c.applyPending()
	c.advance(e.Revision)
}

// Restart prepares the cache for a reader that starts at the beginning of the log. If the log does not hold the message
// after Progress any longer, its first message resets every resource.
func (c *Cache) Restart() {
	c.pending = nil
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started = false
}

func (c *Cache) hasStarted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.started
}

// start handles the first message of a log whose first messages are gone. If the cache has all of them, it continues.
func (c *Cache) start(e *logv1.Event) {
	low := e.Revision
	if e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Index == 0 {
		low--
	}
	continues := e.Epoch == *c.epoch.Load() && low <= c.progress.Load()
	c.epoch.Store(&e.Epoch)
	c.mu.Lock()
	c.started = true
	if !continues {
		c.low = low
	}
	c.mu.Unlock()
	if !continues {
		c.each(func(r *Resource) { r.forget(low, false, 0) })
	}
}

// applyPending applies a transaction, one batch for each resource.
func (c *Cache) applyPending() {
	pending, before := c.pending, c.ringBytes.Load()
	c.pending = nil
	for len(pending) > 0 {
		name := pending[0].StorageResource
		var batch []*logv1.Event
		rest := pending[:0:0]
		for _, p := range pending {
			if p.StorageResource == name {
				batch = append(batch, p)
			} else {
				rest = append(rest, p)
			}
		}
		c.applyTo(name, batch)
		pending = rest
	}
	if c.eventsOnly {
		c.evict(c.ringBytes.Load() - before)
	}
	c.applied.Store(time.Now().UnixNano())
}

// applyTo applies a transaction's events of one resource. If that fails, it resets the resource, and the next reader
// loads it again.
func (c *Cache) applyTo(name string, events []*logv1.Event) {
	if err := c.tryApply(name, events); err != nil {
		revision := events[0].Revision
		slog.Error("Cannot apply events; resetting their resource", "resource", name, "revision", revision)
		c.Resource(name).forget(max(revision, c.progress.Load()), false, revision)
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

func (c *Cache) advance(revision int64) {
	if revision > c.progress.Load() {
		c.progress.Store(revision)
		c.notifyAdvanced()
	}
}

func (c *Cache) notifyAdvanced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanced.Notify()
}

// reset resets every resource, because events before revision may be missing. revision may be lower than progress if
// etcd was restored from a backup.
func (c *Cache) reset(revision int64, epoch string) {
	c.resetMu.Lock()
	defer c.resetMu.Unlock()
	c.pending = nil
	c.mu.Lock()
	c.started, c.low = true, revision
	c.mu.Unlock()
	previous := *c.epoch.Load()
	if epoch != "" {
		c.epoch.Store(&epoch)
	}
	c.progress.Store(revision)
	// A CRD revision of the previous epoch has no meaning in the new one.
	epochChanged := previous != "" && epoch != "" && previous != epoch
	c.each(func(r *Resource) { r.forget(revision, epochChanged, 0) })
	c.notifyAdvanced()
}

// Progress returns the revision up to which every event has been applied.
func (c *Cache) Progress() int64 { return c.progress.Load() }

// Epoch returns the epoch of etcd that revisions belong to; empty if the log has not named it. A change of epoch
// overruns every cursor.
func (c *Cache) Epoch() string { return *c.epoch.Load() }

// Advanced returns a channel that is closed when Progress advances.
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
