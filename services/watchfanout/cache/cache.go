// Package cache holds encoded objects and the recent events of every stored resource. It knows bytes, labels and
// fields, and no type of any API.
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

// Cache is every resource of one replica. One goroutine applies the log to it; any number reads.
//
// Each resource has a lock of its own. An event is applied to its resource before progress says so: whoever reads
// progress first and the resource afterwards misses nothing up to it.
type Cache struct {
	// RingBytes bounds the recent events kept for each resource, with what was made of them.
	RingBytes int
	// IdleTimeout is how long a resource that nobody reads is kept; 0 for ever.
	IdleTimeout time.Duration

	// resetMu is held for writing while everything is forgotten: no reader sees some of it gone.
	resetMu  sync.RWMutex
	progress atomic.Int64
	epoch    atomic.Pointer[string]
	resets   atomic.Int64
	// observed is when the newest event was seen by the publisher, and applied when it was applied here.
	observed, applied atomic.Int64

	mu        sync.Mutex // guards what follows
	resources map[string]*Resource
	low       int64
	started   bool
	advanced  watchable.Signal

	pending []*logv1.Event // belongs to the goroutine that applies
}

// New returns an empty cache.
func New(ringBytes int, idleTimeout time.Duration) *Cache {
	c := &Cache{RingBytes: ringBytes, IdleTimeout: idleTimeout, resources: map[string]*Resource{}}
	c.epoch.Store(new(string))
	return c
}

// Resource finds or makes a resource's entry.
func (c *Cache) Resource(name string) *Resource {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, ok := c.resources[name]
	if !ok {
		r = &Resource{
			Name:          name,
			cache:         c,
			low:           c.low,
			triggers:      map[Trigger]*triggerRing{},
			triggerFields: map[string]int{},
			lastUsed:      time.Now(),
		}
		c.resources[name] = r
	}
	return r
}

// each calls f for every resource there is.
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

// Apply takes the log's next message. The events of one transaction are applied together, at its last one.
func (c *Cache) Apply(e *logv1.Event) {
	switch {
	case e.Type == logv1.Type_TYPE_RESET && e.StorageResource != "" && c.hasStarted():
		c.applyPending() // it is of one resource, in its place among the events
		// Published again, it must not say that what was not applied again is there.
		c.Resource(e.StorageResource).forget(max(e.Revision, c.progress.Load()), e.CrdChanged, e.Revision)
		if !e.CrdChanged {
			c.resets.Add(1)
		}
		c.advance(e.Revision)
		return
	case events.IsRefill(e, *c.epoch.Load(), c.progress.Load()) && c.hasStarted():
		c.pending = nil // an open transaction comes whole
		return
	case e.Type == logv1.Type_TYPE_RESET:
		c.reset(e.Revision, e.Epoch)
		c.resets.Add(1)
		return
	case e.Epoch != "" && *c.epoch.Load() != "" && e.Epoch != *c.epoch.Load():
		c.reset(e.Revision, e.Epoch) // the log was made anew, and its beginning is gone
		c.resets.Add(1)
	case !c.hasStarted():
		c.start(e)
	}
	if e.Type == logv1.Type_TYPE_UNSPECIFIED {
		c.advance(e.Revision)
		return
	}
	if e.Revision <= c.progress.Load() { // published again, after the log had lost its end
		return
	}
	c.pending = append(c.pending, e)
	if e.More {
		return
	}
	c.applyPending()
	c.advance(e.Revision)
}

func (c *Cache) hasStarted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.started
}

// start takes the first message of a log whose beginning is gone.
func (c *Cache) start(e *logv1.Event) {
	low := e.Revision
	if e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Index == 0 {
		low--
	}
	c.epoch.Store(&e.Epoch)
	c.mu.Lock()
	c.started, c.low = true, low
	c.mu.Unlock()
	c.each(func(r *Resource) { r.forget(low, false, 0) })
}

// applyPending applies a transaction: to each resource at once.
func (c *Cache) applyPending() {
	pending := c.pending
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
	c.applied.Store(time.Now().UnixNano())
}

// applyTo applies a transaction's events of one resource. What cannot be applied is forgotten with the resource, which
// readers bring back.
func (c *Cache) applyTo(name string, events []*logv1.Event) {
	if err := c.tryApply(name, events); err != nil {
		revision := events[0].Revision
		slog.Error("Events cannot be applied; their resource is read anew", "resource", name, "revision", revision)
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

// reset forgets everything: there may be a gap before revision, which may be less than before where etcd was restored
// from a backup.
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
	epochChanged := previous != "" && epoch != "" && previous != epoch // where a definition changed says nothing then
	c.each(func(r *Resource) { r.forget(revision, epochChanged, 0) })
	c.notifyAdvanced()
}

// Progress is the revision up to which everything has been applied.
func (c *Cache) Progress() int64 { return c.progress.Load() }

// Epoch names the history of etcd that revisions are of; empty where the log does not say. A cursor that was got
// before it changed has been overrun.
func (c *Cache) Epoch() string { return *c.epoch.Load() }

// Wait waits until everything up to revision has been applied. ask is called when that does not come by itself.
func (c *Cache) Wait(ctx context.Context, revision int64,
	requestProgress func(ctx context.Context, advanced <-chan struct{})) error {
	for {
		c.mu.Lock()
		advanced := c.advanced.C()
		c.mu.Unlock()
		if c.progress.Load() >= revision {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		requestProgress(ctx, advanced)
	}
}
