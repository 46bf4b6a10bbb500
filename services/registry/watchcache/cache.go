// Package tail keeps the end of the event log for the readers within registry: its own informers, and the watches of
// authn, authz and admission.
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

// Cache is the end of the event log, read once for all who read it here.
type Cache struct {
	mu sync.Mutex
	// rings are the events of each stored resource, and bytes what all of them take.
	rings map[string]*ring
	bytes int
	// Events after low are in the rings, but for what those say is gone. Everything up to high has come.
	low, high int64
	epoch     string
	started   bool
	// OnEpochChange, if set, is called when the log goes on with another history of etcd: revisions mean something else from
	// then on. It must not wait.
	OnEpochChange func()
	// OnEvent, if set, is called with each event. It must not wait.
	OnEvent func(*logv1.Event)
	// resetCount counts how often everything was dropped.
	resetCount int
	// behindSince is since when the tail stands at was though etcd has more; the zero time where it had all when it was last
	// compared.
	behindSince     time.Time
	stalledRevision int64
	// caughtUpAt is when etcd's revision was asked for that the tail has reached; asked and revision are of the next one.
	caughtUpAt, requestedAt time.Time
	etcdRevision            int64
}

// ring is the newest events of one stored resource.
type ring struct {
	events.Ring[*logv1.Event]
	bytes int
	// evictedPosition is the newest event that is kept no longer.
	evictedPosition events.Position
	// crdRevision is since when objects are read as they are now: their definition changed.
	crdRevision int64
	changed     watchable.Signal
}

const (
	// maxBytes bounds the events that are kept, of all resources together, but for the newest one; those of whichever
	// takes most are given up first.
	maxBytes = 8 << 20
	// ProgressPeriod is how often the tail is compared with etcd.
	ProgressPeriod = time.Second
	// stallTimeout is for how long the log may not bring what etcd has, until readers are sent to another registry.
	stallTimeout = 3 * time.Second
)

// ErrExpired ends a reading whose next events are not kept any more, or whose resource is to be read anew.
var ErrExpired = errors.New("what comes next is no longer kept")

// New returns a tail that has read nothing yet.
func New() *Cache { return &Cache{rings: map[string]*ring{}} }

// Reset makes ready for a reader that begins anew, at the log's beginning: what follows now may be cut off from what
// was kept.
func (c *Cache) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clear(0)
	c.started = false
}

// clear forgets every event; those after low are to come. Whoever was reading is overrun.
func (c *Cache) clear(low int64) {
	c.resetCount++
	c.bytes, c.low, c.high = 0, low, low
	for _, r := range c.rings {
		r.Drop(r.Len())
		r.bytes, r.evictedPosition = 0, events.Position{}
		r.changed.Notify()
	}
}

// ring is a resource's, made where there is none. The lock is held.
func (c *Cache) ring(storageResource string) *ring {
	r := c.rings[storageResource]
	if r == nil {
		r = &ring{}
		c.rings[storageResource] = r
	}
	return r
}

// Apply adds the log's next message.
func (c *Cache) Apply(e *logv1.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	event := e.Type != logv1.Type_TYPE_UNSPECIFIED && (e.Type != logv1.Type_TYPE_RESET || e.StorageResource != "")
	epochChanged := e.Epoch != "" && c.epoch != "" && e.Epoch != c.epoch
	switch {
	case c.started && events.IsRefill(e, c.epoch, c.high):
	case e.Type == logv1.Type_TYPE_RESET && !event:
		c.clear(e.Revision)
	case !c.started, epochChanged: // the log's beginning is gone
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
		for _, r := range c.rings { // somebody may be due to be told
			r.changed.Notify()
		}
		return nil
	}
	// What is published again, after the log had lost its end, is here already.
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

// evict gives up the oldest event of the resource that takes most, but for the newest of all, which somebody is to
// read.
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

// Progress is how far the tail has come, and in which history of etcd.
func (c *Cache) Progress() (revision int64, epoch string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.high, c.epoch
}

// CRDRevision is since when objects of a stored resource are read as they are now; 0: for as long as is known.
func (c *Cache) CRDRevision(storageResource string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ring(storageResource).crdRevision
}

// Stalled says whether the log has not brought what etcd has for long.
func (c *Cache) Stalled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	advanced := c.high != c.stalledRevision // one that is late, and comes, is not stalled
	return !c.behindSince.IsZero() && !advanced && time.Since(c.behindSince) > stallTimeout
}

// maxStaleness is how old what the tail tells may be for whoever decides by it.
const maxStaleness = 4 * ProgressPeriod

// Fresh says whether the tail has come as far as etcd was a moment ago.
func (c *Cache) Fresh() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.updateCaughtUp()
	return time.Since(c.caughtUpAt) < maxStaleness
}

// updateCaughtUp notes that the tail has come to where etcd was when it was asked. The lock is held.
func (c *Cache) updateCaughtUp() {
	if c.high >= c.etcdRevision && c.requestedAt.After(c.caughtUpAt) {
		c.caughtUpAt = c.requestedAt
	}
}

// RequestProgress compares the tail with etcd's revision every ProgressPeriod until ctx is done. Where the log lags it calls
// ask, which has the publisher say how far it is: readers tell by it how fresh they are.
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
		if err != nil { // nobody can say
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
			_ = request() // again in a moment, where it fails
		}
	}
}

// Watcher reads the events of one stored resource from a place on: those after it.
type Watcher struct {
	cache *Cache
	ring  *ring
	// position is the place of the newest event that was read.
	position   events.Position
	next       int64 // the sequence of the next event; -1 before the first reading
	resetCount int
}

// Watch begins to read a stored resource's events after a place.
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

// Next answers what has come since it was called last, and up to which revision that is everything: 0 before the log
// has been read at all. changed is closed when there are more events. ErrExpired: the reading is at its end.
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
			after-- // its transaction may hold more
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
			err = ErrExpired // after what has come before it
			break
		}
		batch = append(batch, e)
		w.position.Revision, w.position.Index = e.Revision, e.Index
	}
	w.next = r.Next()
	return batch, c.high, r.changed.C(), err
}

// Epoch is that of etcd which the reading is of; empty before anything is known.
func (w *Watcher) Epoch() string { return w.position.Epoch }

// Each calls handle with every event until ctx is done, handle fails, or the reading is at its end.
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
