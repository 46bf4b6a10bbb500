// Package watchcache caches the end of the event log for readers within the registry: its own informers, and the
// watches of authn, authz and admission. It is smaller than the watch tier's cache and holds events only, no objects.
//
// The goroutine that reads the log calls Reset and Apply. RequestProgress runs in a task of its own. A Watcher belongs
// to a single goroutine. A lock guards the rest.
package watchcache

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchable"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Cache holds the recent events of the log, by stored resource.
type Cache struct {
	mu sync.Mutex
	// rings holds the events of each stored resource. bytes is their total size.
	rings map[string]*ring
	bytes int
	// The rings hold the events after low, except evicted events. All events up to high have been applied.
	low, high int64
	epoch     string
	started   bool
	// OnEpochChange, if set, is called when the log continues in another epoch of etcd: revisions before and after it
	// cannot be compared. It must not block.
	OnEpochChange func()
	// OnEvent, if set, is called with each event. It must not block.
	OnEvent func(*logv1.Event)
	// resetCount counts how often all events were dropped.
	resetCount int
	// behindSince is when the cache was first found behind etcd at stalledRevision. Zero: the last comparison found it
	// not behind.
	behindSince     time.Time
	stalledRevision int64
	// caughtUpAt is when etcd returned the latest revision that the cache has reached. requestedAt and etcdRevision
	// belong to the next revision.
	caughtUpAt, requestedAt time.Time
	etcdRevision            int64
}

// ring holds the newest events of a stored resource.
type ring struct {
	events.Ring[*logv1.Event]
	bytes int
	// evictedPosition is the position of the newest evicted event.
	evictedPosition events.Position
	// crdRevision is the revision of the last change of the CRD.
	crdRevision int64
	changed     watchable.Signal
}

const (
	// maxBytes bounds the cached events of all resources together, without the newest event. The resource with the most
	// bytes loses its events first.
	maxBytes = 8 << 20
	// ProgressPeriod is how often the cache compares its revision with etcd's.
	ProgressPeriod = time.Second
	// stallTimeout is how long the log may not advance while etcd has more. Watches then move to another registry.
	stallTimeout = 3 * time.Second
)

// ErrExpired ends a Watcher whose next event is not cached, or whose resource was reset.
var ErrExpired = errors.New("the next event is no longer cached")

// New returns an empty cache.
func New() *Cache { return &Cache{rings: map[string]*ring{}} }

// Reset prepares the cache for a reader that starts at the beginning of the log. The events may not follow the cached
// events, so all are dropped.
func (c *Cache) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clear(0)
	c.started = false
}

// clear drops every event and expires all watchers. Events after low follow.
func (c *Cache) clear(low int64) {
	c.resetCount++
	c.bytes, c.low, c.high = 0, low, low
	for _, r := range c.rings {
		r.Drop(r.Len())
		r.bytes, r.evictedPosition = 0, events.Position{}
		r.changed.Notify()
	}
}

// ring returns a resource's ring and makes it if needed. The caller holds the lock.
func (c *Cache) ring(storageResource string) *ring {
	r := c.rings[storageResource]
	if r == nil {
		r = &ring{}
		c.rings[storageResource] = r
	}
	return r
}

// Apply applies the log's next message.
//
//	progress                                 high advances
//	event, reset of a resource               added to its ring; an event that was published again is skipped
//	reset of all resources                   the rings are cleared; a refill of the same epoch keeps them
//	first message, message of another epoch  the rings are cleared
func (c *Cache) Apply(e *logv1.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	event := e.Type != logv1.Type_TYPE_UNSPECIFIED && (e.Type != logv1.Type_TYPE_RESET || e.StorageResource != "")
	epochChanged := e.Epoch != "" && c.epoch != "" && e.Epoch != c.epoch
	switch {
	case c.started && events.IsRefill(e, c.epoch, c.high):
	case e.Type == logv1.Type_TYPE_RESET && !event:
		c.clear(e.Revision)
	case !c.started, epochChanged: // the log lacks the messages before this message
		low := e.Revision
		if event && e.Index == 0 {
			low--
		}
		c.clear(low)
	}
	c.started = true
	if e.Epoch != "" {
		c.epoch = e.Epoch
	}
	if epochChanged {
		for _, r := range c.rings {
			r.crdRevision = 0
		}
		if c.OnEpochChange != nil {
			c.OnEpochChange()
		}
	}
	if !event {
		c.high = max(c.high, e.Revision)
		for _, r := range c.rings { // a watcher may have a bookmark due
			r.changed.Notify()
		}
		return nil
	}
	// The publisher publishes an event again if the log lost its end. The ring already holds it.
	if e.Revision > c.high || e.Revision == c.high && e.Type == logv1.Type_TYPE_RESET {
		c.insert(e)
	}
	return nil
}

func (c *Cache) insert(e *logv1.Event) {
	if c.OnEvent != nil {
		c.OnEvent(e)
	}
	r := c.ring(e.StorageResource)
	if e.CrdChanged {
		r.crdRevision = max(r.crdRevision, e.Revision)
	}
	r.Add(e)
	n := proto.Size(e)
	r.bytes, c.bytes = r.bytes+n, c.bytes+n
	if !e.More {
		c.high = max(c.high, e.Revision)
	}
	r.changed.Notify()
	for c.bytes-n > maxBytes {
		c.evict(e)
	}
}

// evict drops the oldest event of the resource with the most bytes. It never drops the newest event, because its
// watchers have not read it.
func (c *Cache) evict(newest *logv1.Event) {
	var largest *ring
	for _, r := range c.rings {
		if r.Len() > 0 && r.Oldest() != newest && (largest == nil || r.bytes > largest.bytes) {
			largest = r
		}
	}
	e := largest.Oldest()
	n := proto.Size(e)
	largest.bytes, c.bytes = largest.bytes-n, c.bytes-n
	largest.evictedPosition = events.PositionOf(e)
	largest.Drop(1)
}

// Progress returns the revision up to which the cache is complete, and its epoch.
func (c *Cache) Progress() (revision int64, epoch string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.high, c.epoch
}

// CRDRevision returns the revision of the last change of a stored resource's CRD. 0: the cache has seen none.
func (c *Cache) CRDRevision(storageResource string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ring(storageResource).crdRevision
}

// Stalled reports whether the log has not advanced for stallTimeout while etcd has more.
func (c *Cache) Stalled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	advanced := c.high != c.stalledRevision // a log that is behind and advances is not stalled
	return !c.behindSince.IsZero() && !advanced && time.Since(c.behindSince) > stallTimeout
}

// maxStaleness is how old the cache may be for a decision.
const maxStaleness = 4 * ProgressPeriod

// Fresh reports whether the cache has reached a revision that etcd had less than maxStaleness ago.
func (c *Cache) Fresh() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.updateCaughtUp()
	return time.Since(c.caughtUpAt) < maxStaleness
}

// updateCaughtUp updates caughtUpAt if the cache has reached etcdRevision. The caller holds the lock.
func (c *Cache) updateCaughtUp() {
	if c.high >= c.etcdRevision && c.requestedAt.After(c.caughtUpAt) {
		c.caughtUpAt = c.requestedAt
	}
}

// RequestProgress compares the cache with etcd's revision every ProgressPeriod until ctx is done. If the cache is
// behind, it calls request, which makes the publisher publish its progress.
func (c *Cache) RequestProgress(
	ctx context.Context,
	readRevision func(context.Context) (int64, error),
	request func() error,
) error {
	tick := time.NewTicker(ProgressPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		requestedAt := time.Now()
		readCtx, cancel := context.WithTimeout(ctx, ProgressPeriod)
		now, err := readRevision(readCtx)
		cancel()
		if err != nil { // etcd does not respond
			continue
		}
		c.mu.Lock()
		if c.updateCaughtUp(); !c.requestedAt.After(c.caughtUpAt) {
			c.requestedAt, c.etcdRevision = requestedAt, now
			c.updateCaughtUp()
		}
		behind := c.high < now
		switch {
		case !behind:
			c.behindSince = time.Time{}
		case c.behindSince.IsZero() || c.high != c.stalledRevision:
			c.behindSince, c.stalledRevision = requestedAt, c.high
		}
		c.mu.Unlock()
		if behind {
			_ = request() // an error is retried in the next period
		}
	}
}

// Watcher reads the events of a stored resource after a position. Its states:
//
//	new ── Next before the log is read ──▶ new
//	new ── Next, position in the cache ──▶ reading
//	new, reading ── another epoch, evicted, reset ──▶ expired: Next returns ErrExpired
type Watcher struct {
	cache *Cache
	ring  *ring
	// position is the position of the last event that was read.
	position   events.Position
	next       int64 // the sequence of the next event; -1 before the first read
	resetCount int
}

// Watch returns a watcher of a stored resource's events after a position.
func (c *Cache) Watch(storageResource string, after events.Position) *Watcher {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &Watcher{
		cache:    c,
		ring:     c.ring(storageResource),
		position: after,
		next:     -1,
	}
}

// Next returns the events since the last call, and the revision up to which they are complete: 0 before the log is
// read. changed is closed when there are more events. After ErrExpired the watcher must not be used.
func (w *Watcher) Next() (batch []*logv1.Event, high int64, changed <-chan struct{}, err error) {
	c, r := w.cache, w.ring
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.started && w.next < 0 {
		return nil, 0, r.changed.C(), nil
	}
	if w.position.DifferentEpoch(events.Position{Epoch: c.epoch}) || w.next >= 0 && w.resetCount != c.resetCount {
		return nil, 0, nil, ErrExpired
	}
	if w.next < 0 {
		after := w.position.Revision
		if w.position.Index != events.LastIndex {
			after-- // the rest of its transaction follows
		}
		if after < c.low {
			return nil, 0, nil, ErrExpired
		}
		w.resetCount, w.position.Epoch = c.resetCount, c.epoch
		w.next = r.Search(func(e *logv1.Event) bool { return e.Revision > after })
	}
	if w.next <= r.Base() && w.position.Before(r.evictedPosition) {
		return nil, 0, nil, ErrExpired
	}
	for _, e := range r.From(w.next) {
		if !w.position.Before(events.PositionOf(e)) {
			continue
		}
		if e.Type == logv1.Type_TYPE_RESET {
			err = ErrExpired // the events before the reset are returned first
			break
		}
		batch = append(batch, e)
		w.position.Revision, w.position.Index = e.Revision, e.Index
	}
	w.next = r.Next()
	return batch, c.high, r.changed.C(), err
}

// Epoch returns the epoch that the watcher reads. It is empty if it is unknown.
func (w *Watcher) Epoch() string { return w.position.Epoch }

// Each calls handle with every event until ctx is done, handle fails, or the watcher expires.
func (w *Watcher) Each(ctx context.Context, handle func(*logv1.Event) error) error {
	for {
		batch, _, changed, err := w.Next()
		for _, e := range batch {
			if err := handle(e); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
