// Package cache holds encoded objects and the recent events of every stored resource. It knows bytes, labels and fields,
// and no type of any API.
package cache

import (
	"context"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Item is one object. It does not change.
type Item struct {
	// Key is "namespace/name", or "name" for a cluster's own objects: etcd's order.
	Key             string
	Namespace, Name string
	Revision        int64
	Labels, Fields  map[string]string
	// JSON has no apiVersion and kind; Protobuf has no envelope.
	JSON, Protobuf []byte
}

// Size is the memory that the item's bytes take.
func (i *Item) Size() int { return len(i.JSON) + len(i.Protobuf) + len(i.Key) + 200 }

// Event is one change. Item is the object after it (for a deletion the last state, at the deletion's revision);
// Previous is the object before it at this revision, where a selector could tell the two apart.
type Event struct {
	Type           logv1.Type
	Revision       int64
	Index          int32
	Item, Previous *Item
	ObservedNano   int64

	frames derived
}

// derived keeps what was made of an event, so that it is made once for all who want it.
type derived struct {
	mu   sync.Mutex
	made []*made
}

type made struct {
	key   any
	done  chan struct{}
	bytes []byte
	err   error
}

// get makes what is not there. Who wants the same waits for it; who wants something else does not.
func (d *derived) get(key any, build func() ([]byte, error)) ([]byte, error) {
	d.mu.Lock()
	for _, m := range d.made {
		if m.key == key {
			d.mu.Unlock()
			<-m.done
			return m.bytes, m.err
		}
	}
	m := &made{key: key, done: make(chan struct{})}
	d.made = append(d.made, m)
	d.mu.Unlock()
	defer close(m.done)
	if m.bytes, m.err = build(); m.err != nil { // the next one tries again
		d.mu.Lock()
		d.made = slices.DeleteFunc(d.made, func(o *made) bool { return o == m })
		d.mu.Unlock()
	}
	return m.bytes, m.err
}

// Frame is a frame of the event, made at most once for each key.
func (e *Event) Frame(key any, make func() ([]byte, error)) ([]byte, error) {
	return e.frames.get(key, make)
}

// Cache is every resource of one replica.
type Cache struct {
	// RingBytes bounds the recent events kept for each resource.
	RingBytes int

	mu        sync.Mutex
	resources map[string]*Resource
	progress  int64
	low       int64
	started   bool
	advanced  chan struct{}
	pending   []*logv1.Event
}

// New returns an empty cache.
func New(ringBytes int) *Cache {
	return &Cache{RingBytes: ringBytes, resources: map[string]*Resource{}, advanced: make(chan struct{})}
}

// Resource is one stored resource's objects and events, all guarded by the cache's lock.
type Resource struct {
	Name  string
	cache *Cache

	tree     *btree.BTreeG[*Item] // nil until loaded
	snapshot *btree.BTreeG[*Item] // a clone of tree, good until the next change
	bytes    int

	ring      []*Event
	base      int64 // the sequence of ring[0]
	ringBytes int
	low       int64 // events after this revision are all in the ring
	changed   chan struct{}

	loading *load
}

type load struct {
	done chan struct{}
	err  error
}

func less(a, b *Item) bool { return a.Key < b.Key }

// Resource finds or makes a resource's entry.
func (c *Cache) Resource(name string) *Resource {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resource(name)
}

func (c *Cache) resource(name string) *Resource {
	r, ok := c.resources[name]
	if !ok {
		r = &Resource{Name: name, cache: c, low: c.low, changed: make(chan struct{})}
		c.resources[name] = r
	}
	return r
}

// Apply takes the log's next message. The events of one transaction are applied together, at its last one.
func (c *Cache) Apply(e *logv1.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case e.Type == logv1.Type_TYPE_RESET:
		c.reset(e.Revision)
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
	for _, p := range c.pending {
		c.resource(p.StoredAs).apply(eventOf(p))
	}
	c.pending = nil
	c.advance(e.Revision)
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
		r.tree, r.snapshot, r.bytes = nil, nil, 0
		r.base += int64(len(r.ring)) + 1 // also who has seen every event is past the end of what can be followed
		r.ring, r.ringBytes, r.low = nil, 0, revision
		r.notify()
	}
	c.progress = revision // it may be less than before: etcd was restored from a backup
	close(c.advanced)
	c.advanced = make(chan struct{})
}

func eventOf(p *logv1.Event) *Event {
	e := &Event{Type: p.Type, Revision: p.Revision, Index: p.Index, ObservedNano: p.ObservedUnixNano}
	e.Item = itemOf(p.Namespace, p.Name, p.Revision, p.Object)
	if p.Previous != nil {
		e.Previous = itemOf(p.Namespace, p.Name, p.Revision, p.Previous)
	}
	return e
}

func itemOf(namespace, name string, revision int64, o *logv1.Object) *Item {
	return &Item{Key: Key(namespace, name), Namespace: namespace, Name: name, Revision: revision, Labels: o.Labels, Fields: o.Fields, JSON: o.Json, Protobuf: o.Protobuf}
}

// Key is an object's place in the order of etcd's keys.
func Key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

func (r *Resource) apply(e *Event) {
	if r.tree != nil {
		r.change(e)
	}
	r.ring = append(r.ring, e)
	r.ringBytes += e.Item.Size()
	for len(r.ring) > 1 && (r.ringBytes > r.cache.RingBytes || r.ring[0].Revision == r.low) { // a revision goes whole
		first := r.ring[0]
		r.low = first.Revision
		r.ringBytes -= first.Item.Size()
		r.ring[0] = nil
		r.ring = r.ring[1:]
		r.base++
	}
	r.notify()
}

func (r *Resource) change(e *Event) {
	r.snapshot = nil
	if e.Type == logv1.Type_TYPE_DELETED {
		if old, ok := r.tree.Delete(e.Item); ok {
			r.bytes -= old.Size()
		}
		return
	}
	if old, ok := r.tree.ReplaceOrInsert(e.Item); ok {
		r.bytes -= old.Size()
	}
	r.bytes += e.Item.Size()
}

func (r *Resource) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
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

// Snapshot is a resource as it was at one revision.
type Snapshot struct {
	Revision int64
	tree     *btree.BTreeG[*Item]
}

// Len is how many objects there are.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get finds one object.
func (s *Snapshot) Get(key string) (*Item, bool) { return s.tree.Get(&Item{Key: key}) }

// Scan calls visit with the objects whose keys begin with prefix, from the key from on, in order, until it returns false.
func (s *Snapshot) Scan(prefix, from string, visit func(*Item) bool) {
	s.tree.AscendGreaterOrEqual(&Item{Key: max(prefix, from)}, func(i *Item) bool {
		return strings.HasPrefix(i.Key, prefix) && visit(i)
	})
}

// Snapshot is the resource now; it is loaded first if it is not there.
func (r *Resource) Snapshot(ctx context.Context, source func(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error), wait func(context.Context, int64) error) (*Snapshot, error) {
	for {
		r.cache.mu.Lock()
		if r.tree != nil {
			if r.snapshot == nil {
				r.snapshot = r.tree.Clone()
			}
			s := &Snapshot{Revision: r.cache.progress, tree: r.snapshot}
			r.cache.mu.Unlock()
			return s, nil
		}
		l := r.loading
		if l == nil {
			l = &load{done: make(chan struct{})}
			r.loading = l
			go r.load(context.WithoutCancel(ctx), l, source, wait)
		}
		r.cache.mu.Unlock()
		select {
		case <-l.done:
			if l.err != nil {
				return nil, l.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// SnapshotAt is the resource as it was at a revision, where it is loaded and has not changed since. It lets a replica go on
// with a list that another one began.
func (r *Resource) SnapshotAt(revision int64) (*Snapshot, bool) {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	if r.tree == nil || revision < r.low || r.cache.progress < revision {
		return nil, false
	}
	if n := len(r.ring); n > 0 && r.ring[n-1].Revision > revision {
		return nil, false
	}
	if r.snapshot == nil {
		r.snapshot = r.tree.Clone()
	}
	return &Snapshot{Revision: revision, tree: r.snapshot}, true
}

// loadTimeout bounds the reading of one resource.
const loadTimeout = time.Minute

// load reads a snapshot and adds the events that came after it.
func (r *Resource) load(ctx context.Context, l *load, source func(context.Context, string) ([]*registryv1.Row, int64, error), wait func(context.Context, int64) error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	rows, revision, err := source(ctx, r.Name)
	if err == nil {
		err = wait(ctx, revision) // the log must have passed the snapshot, lest the cache be newer than it says
	}
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	defer close(l.done)
	r.loading = nil
	if err != nil {
		l.err = err
		return
	}
	if r.low > revision {
		return // the events after the snapshot are gone from the ring: whoever waits loads again
	}
	r.tree, r.snapshot, r.bytes = btree.NewG(64, less), nil, 0
	for _, row := range rows {
		i := &Item{Key: Key(row.Namespace, row.Name), Namespace: row.Namespace, Name: row.Name, Revision: row.Revision, Labels: row.Labels, Fields: row.Fields, JSON: row.Json, Protobuf: row.Protobuf}
		r.tree.ReplaceOrInsert(i)
		r.bytes += i.Size()
	}
	for _, e := range r.ring {
		if e.Revision > revision {
			r.change(e)
		}
	}
}

// Cursor is a place between two events of a resource.
type Cursor struct {
	sequence int64
}

// After is the place after an event's position. ok is false where what comes next is no longer there; low is the
// oldest revision that can be resumed from.
func (r *Resource) After(revision int64, index int32) (cur Cursor, low int64, ok bool) {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	if revision < r.low {
		return Cursor{}, r.low, false
	}
	i := sort.Search(len(r.ring), func(i int) bool {
		e := r.ring[i]
		return e.Revision > revision || e.Revision == revision && e.Index > index
	})
	return Cursor{r.base + int64(i)}, r.low, true
}

// Next is what came after the cursor, at most n events, and where to go on. Where nothing came, changed is closed when
// something does. progress is the revision that has been reached once the events are seen. ok is false where the
// cursor was overrun.
func (r *Resource) Next(cur Cursor, n int) (events []*Event, next Cursor, progress int64, changed <-chan struct{}, ok bool) {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	if cur.sequence < r.base {
		return nil, cur, 0, nil, false
	}
	start := int(cur.sequence - r.base)
	end := min(len(r.ring), start+n)
	progress = r.cache.progress
	if end < len(r.ring) {
		progress = 0 // more is to come
	}
	return slices.Clone(r.ring[start:end]), Cursor{cur.sequence + int64(end-start)}, progress, r.changed, true
}

// Status is what an operator sees of one resource.
type Status struct {
	Name               string
	Loaded             bool
	Objects, Bytes     int
	Events, EventBytes int
	OldestResumable    int64
}

// Status lists the resources.
func (c *Cache) Status() []Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Status
	for _, r := range c.resources {
		s := Status{Name: r.Name, Loaded: r.tree != nil, Bytes: r.bytes, Events: len(r.ring), EventBytes: r.ringBytes, OldestResumable: r.low}
		if r.tree != nil {
			s.Objects = r.tree.Len()
		}
		all = append(all, s)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}
