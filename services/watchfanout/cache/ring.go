package cache

import (
	"slices"
	"time"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchable"
)

// ring is recent events, which can be waited for.
type ring struct {
	events.Ring[*Event]
	changed watchable.Signal
}

// forget drops the events up to a revision.
func (g *ring) forget(revision int64) {
	g.DropWhile(func(e *Event) bool { return e.Revision <= revision })
}

// reset overruns every cursor and wakes whoever waits at one.
func (g *ring) reset() {
	g.Reset()
	g.changed.Notify()
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
	subscribers int
}

// Subscription reads a resource's events, or those of one topic.
type Subscription struct {
	resource *Resource
	topic    Topic
	ring     *ring
}

// Subscribe begins to follow a topic; the zero one is every event. Close it.
func (r *Resource) Subscribe(t Topic) *Subscription {
	r.mu.Lock()
	r.subscribers++
	if t == (Topic{}) {
		defer r.mu.Unlock()
		return &Subscription{resource: r, ring: &r.all}
	}
	if own := r.topics[t]; own != nil {
		defer r.mu.Unlock()
		return r.join(t, own)
	}
	past, next := r.all.All(), r.all.Next()
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
		if r.all.Base() <= next { // else the ring has been reset meanwhile, or what was seen of it has gone by
			for _, e := range concerned {
				own.Add(e)
			}
		} else {
			next = r.all.Base()
		}
		for _, e := range r.all.From(next) {
			if t.has(e) {
				own.Add(e)
			}
		}
		own.forget(r.low)
		r.topics[t] = own
		r.topicFields[t.Field]++
	}
	return r.join(t, own)
}

func (r *Resource) join(t Topic, own *topic) *Subscription {
	own.subscribers++
	return &Subscription{resource: r, topic: t, ring: &own.ring}
}

// Close ends the following.
func (f *Subscription) Close() {
	r := f.resource
	r.mu.Lock()
	defer r.mu.Unlock()
	r.subscribers--
	r.used = time.Now()
	if own := r.topics[f.topic]; own != nil {
		if own.subscribers--; own.subscribers == 0 {
			delete(r.topics, f.topic)
			if r.topicFields[f.topic.Field]--; r.topicFields[f.topic.Field] == 0 {
				delete(r.topicFields, f.topic.Field)
			}
		}
	}
}

// addToTopics adds an event to the topics that it belongs to.
func (r *Resource) addToTopics(e *Event) {
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
		own.Add(e)
		own.changed.Notify()
	}
}

// Cursor is a place between two events of what is followed.
type Cursor int64

// After is the place after an event's position. ok is false where what comes next is no longer there; low is the
// oldest revision that can be resumed from.
func (f *Subscription) After(revision int64, index int32) (cur Cursor, low int64, ok bool) {
	r := f.resource
	r.cache.whole.RLock()
	defer r.cache.whole.RUnlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if revision < r.low {
		return 0, r.low, false
	}
	f.ring.forget(r.low)
	return Cursor(f.ring.Search(func(e *Event) bool {
		return e.Revision > revision || e.Revision == revision && e.Index > index
	})), r.low, true
}

// Next is what came after the cursor, at most n events, and where to go on. Where nothing came, changed is closed when
// something does. progress is the revision that has been reached once the events are seen, 0 where more is to come at
// once. ok is false where the cursor was overrun.
func (f *Subscription) Next(cur Cursor,
	n int) (came []*Event, next Cursor, progress int64, changed <-chan struct{}, ok bool) {
	r := f.resource
	r.cache.whole.RLock()
	defer r.cache.whole.RUnlock()
	progress = r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	f.ring.forget(r.low)
	if int64(cur) < f.ring.Base() {
		return nil, cur, 0, nil, false
	}
	rest := f.ring.From(int64(cur))
	if len(rest) > n {
		rest, progress = rest[:n], 0
	}
	return slices.Clone(rest), cur + Cursor(len(rest)), progress, f.ring.changed.C(), true
}

// Behind is how many events wait after a cursor.
func (f *Subscription) Behind(cur Cursor) int64 {
	f.resource.mu.Lock()
	defer f.resource.mu.Unlock()
	return max(0, f.ring.Next()-int64(cur))
}
