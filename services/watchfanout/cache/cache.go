// Package cache holds encoded objects and the recent events of every stored resource. It knows bytes, labels and fields,
// and no type of any API.
package cache

import (
	"context"
	"sync"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Cache is every resource of one replica.
type Cache struct {
	// RingBytes bounds the recent events kept for each resource.
	RingBytes int
	// IdleAfter is how long a resource that nobody reads is kept; 0 for ever.
	IdleAfter time.Duration

	mu        sync.Mutex
	resources map[string]*Resource
	progress  int64
	low       int64
	started   bool
	advanced  chan struct{}
	pending   []*logv1.Event
	resets    int64
	// observed is when the newest event was seen by the publisher, and applied when it was applied here.
	observed, applied int64
}

// New returns an empty cache.
func New(ringBytes int, idleAfter time.Duration) *Cache {
	return &Cache{RingBytes: ringBytes, IdleAfter: idleAfter, resources: map[string]*Resource{}, advanced: make(chan struct{})}
}

// Resource finds or makes a resource's entry.
func (c *Cache) Resource(name string) *Resource {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resource(name)
}

func (c *Cache) resource(name string) *Resource {
	r, ok := c.resources[name]
	if !ok {
		r = &Resource{Name: name, cache: c, low: c.low, topics: map[Topic]*topic{}, topicFields: map[string]int{}, used: time.Now()}
		r.all.changed = make(chan struct{})
		c.resources[name] = r
	}
	return r
}

// Apply takes the log's next message. The events of one transaction are applied together, at its last one.
func (c *Cache) Apply(e *logv1.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case e.Type == logv1.Type_TYPE_RESET && e.StoredAs != "" && c.started: // of one resource, in its place among the events
		c.applyPending()
		r := c.resource(e.StoredAs)
		r.reset(max(e.Revision, c.progress)) // published again, it must not say that what was not applied again is there
		if e.Redefined {
			r.redefined = e.Revision
		} else {
			c.resets++
		}
		c.advance(e.Revision)
		return
	case e.Type == logv1.Type_TYPE_RESET:
		c.reset(e.Revision)
		c.resets++
		return
	case !c.started:
		c.started = true
		c.low = e.Revision
		if e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Index == 0 {
			c.low = e.Revision - 1
		}
		for _, r := range c.resources {
			r.low = c.low
		}
	}
	if e.Type == logv1.Type_TYPE_UNSPECIFIED {
		c.advance(e.Revision)
		return
	}
	if e.Revision <= c.progress { // published again, after the log had lost its end
		return
	}
	c.pending = append(c.pending, e)
	if e.More {
		return
	}
	c.applyPending()
	c.advance(e.Revision)
}

func (c *Cache) applyPending() {
	for _, p := range c.pending {
		c.resource(p.StoredAs).apply(EventOf(p))
		c.observed = p.ObservedUnixNano
	}
	c.pending, c.applied = nil, time.Now().UnixNano()
}

func (c *Cache) advance(revision int64) {
	if revision > c.progress {
		c.progress = revision
		close(c.advanced)
		c.advanced = make(chan struct{})
	}
}

// reset forgets everything: there may be a gap before revision.
func (c *Cache) reset(revision int64) {
	c.started, c.low, c.pending = true, revision, nil
	for _, r := range c.resources {
		r.reset(revision)
	}
	c.progress = revision // it may be less than before: etcd was restored from a backup
	close(c.advanced)
	c.advanced = make(chan struct{})
}

// Progress is the revision up to which everything has been applied.
func (c *Cache) Progress() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.progress
}

// Wait waits until everything up to revision has been applied. ask is called when that does not come by itself.
func (c *Cache) Wait(ctx context.Context, revision int64, ask func(ctx context.Context, advanced <-chan struct{})) error {
	for {
		c.mu.Lock()
		progress, advanced := c.progress, c.advanced
		c.mu.Unlock()
		if progress >= revision {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		ask(ctx, advanced)
	}
}
