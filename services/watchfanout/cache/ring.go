package cache

import (
	"slices"
	"sort"
	"time"
)

// ring is recent events in order. A cursor is a place in it; what is forgotten overruns the cursors that stood there.
type ring struct {
	events []*Event
	base   int64 // the sequence of events[0]
	// changed is closed when something is added.
	changed chan struct{}
}

func (g *ring) add(e *Event) { g.events = append(g.events, e) }

func (g *ring) notify() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// forget drops the events up to a revision.
func (g *ring) forget(revision int64) {
	n := 0
	for ; n < len(g.events) && g.events[n].Revision <= revision; n++ {
		g.events[n] = nil
	}
	g.events = g.events[n:]
	g.base += int64(n)
}

// reset makes every cursor an overrun one, also of those who have seen every event.
func (g *ring) reset() {
	g.base += int64(len(g.events)) + 1
	g.events = nil
	g.notify()
}

// Topic is a part of a resource's events: those of objects, before or after the event, with a value in a field. With it
// an event wakes those whom it concerns, not everyone who watches the resource.
type Topic struct{ Field, Value string }

// Fields that are not an object's selectable ones.
const (
	// ByKey is an object's key in etcd's order.
	ByKey = "\x00key"
	// ByNamespace is an object's namespace.
	ByNamespace = "\x00namespace"
)

func (t Topic) of(i *Item) string {
	switch t.Field {
	case ByKey:
		return i.Key
	case ByNamespace:
		return i.Namespace
	}
	return i.Fields[t.Field]
}

// Index is the selectable field whose values tell the topic's objects; empty where etcd's own order finds them.
func (t Topic) Index() string {
	if t.Field == ByKey || t.Field == ByNamespace {
		return ""
	}
	return t.Field
}

func (t Topic) has(e *Event) bool {
	return t.of(e.Item) == t.Value || e.Previous != nil && t.of(e.Previous) == t.Value
}

// topic is a ring of its own, as long as anybody follows it.
type topic struct {
	ring
	followers int
}

// Follower reads a resource's events, or those of one topic.
type Follower struct {
	resource *Resource
	topic    Topic
	ring     *ring
}

// Follow begins to follow a topic; the zero one is every event. Close it.
func (r *Resource) Follow(t Topic) *Follower {
	r.mu.Lock()
	r.followers++
	if t == (Topic{}) {
		defer r.mu.Unlock()
		return &Follower{resource: r, ring: &r.all}
	}
	if own := r.topics[t]; own != nil {
		defer r.mu.Unlock()
		return r.join(t, own)
	}
	past, base := slices.Clone(r.all.events), r.all.base
	r.mu.Unlock()
	var concerned []*Event // the whole ring is gone through, with nobody waiting for that
	for _, e := range past {
		if t.has(e) {
			concerned = append(concerned, e)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	own := r.topics[t]
	if own == nil {
		own = &topic{}
		own.changed = make(chan struct{})
		rest := r.all.events // all of them, where the ring has been reset meanwhile or what was seen of it has gone by
		if seen := base + int64(len(past)); r.all.base <= seen {
			own.events, rest = concerned, rest[seen-r.all.base:]
		}
		for _, e := range rest {
			if t.has(e) {
				own.add(e)
			}
		}
		own.forget(r.low)
		r.topics[t] = own
		r.topicFields[t.Field]++
	}
	return r.join(t, own)
}

func (r *Resource) join(t Topic, own *topic) *Follower {
	own.followers++
	return &Follower{resource: r, topic: t, ring: &own.ring}
}

// Close ends the following.
func (f *Follower) Close() {
	r := f.resource
	r.mu.Lock()
	defer r.mu.Unlock()
	r.followers--
	r.used = time.Now()
	if own := r.topics[f.topic]; own != nil {
		if own.followers--; own.followers == 0 {
			delete(r.topics, f.topic)
			if r.topicFields[f.topic.Field]--; r.topicFields[f.topic.Field] == 0 {
				delete(r.topicFields, f.topic.Field)
			}
		}
	}
}

// publish adds an event to the topics that it belongs to.
func (r *Resource) publish(e *Event) {
	for field := range r.topicFields {
		value := Topic{Field: field}.of(e.Item)
		r.publishTo(Topic{field, value}, e)
		if e.Previous != nil {
			if before := (Topic{Field: field}).of(e.Previous); before != value {
				r.publishTo(Topic{field, before}, e)
			}
		}
	}
}

func (r *Resource) publishTo(t Topic, e *Event) {
	if own := r.topics[t]; own != nil {
		own.add(e)
		own.notify()
	}
}

// Cursor is a place between two events of what is followed.
type Cursor int64

// After is the place after an event's position. ok is false where what comes next is no longer there; low is the
// oldest revision that can be resumed from.
func (f *Follower) After(revision int64, index int32) (cur Cursor, low int64, ok bool) {
	r := f.resource
	r.cache.whole.RLock()
	defer r.cache.whole.RUnlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if revision < r.low {
		return 0, r.low, false
	}
	f.ring.forget(r.low)
	i := sort.Search(len(f.ring.events), func(i int) bool {
		e := f.ring.events[i]
		return e.Revision > revision || e.Revision == revision && e.Index > index
	})
	return Cursor(f.ring.base + int64(i)), r.low, true
}

// Next is what came after the cursor, at most n events, and where to go on. Where nothing came, changed is closed when
// something does. progress is the revision that has been reached once the events are seen, 0 where more is to come at
// once. ok is false where the cursor was overrun.
func (f *Follower) Next(cur Cursor, n int) (events []*Event, next Cursor, progress int64, changed <-chan struct{}, ok bool) {
	r := f.resource
	r.cache.whole.RLock()
	defer r.cache.whole.RUnlock()
	progress = r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	f.ring.forget(r.low)
	if int64(cur) < f.ring.base {
		return nil, cur, 0, nil, false
	}
	start := int(int64(cur) - f.ring.base)
	end := min(len(f.ring.events), start+n)
	if end < len(f.ring.events) {
		progress = 0
	}
	return slices.Clone(f.ring.events[start:end]), cur + Cursor(end-start), progress, f.ring.changed, true
}

// Behind is how many events wait after a cursor.
func (f *Follower) Behind(cur Cursor) int64 {
	f.resource.mu.Lock()
	defer f.resource.mu.Unlock()
	return max(0, f.ring.base+int64(len(f.ring.events))-int64(cur))
}
