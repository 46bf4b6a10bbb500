package cache

import (
	"slices"
	"time"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchable"
	"watershed.dev/platform/watchcache/core"
)

// ring is the recent events, and a signal of new events. The lock of its resource guards it.
type ring struct {
	core.Events[*Event]
	changed watchable.Signal
	// waiting has the subscriptions to wake (Await).
	waiting []*Subscription
}

// notify wakes the watches. Many watches are woken in another goroutine, because the caller holds the lock.
func (g *ring) notify() {
	g.changed.Notify()
	if len(g.waiting) == 0 {
		return
	}
	wakes := make([]func(), 0, len(g.waiting))
	for _, s := range g.waiting {
		wakes = append(wakes, s.wake)
		s.place = 0
	}
	g.waiting = nil
	wake := func() {
		for _, w := range wakes {
			w()
		}
	}
	const few = 8
	if len(wakes) <= few {
		wake()
	} else {
		go wake()
	}
}

// await lets the next notify wake a subscription.
func (g *ring) await(s *Subscription) {
	if s.place == 0 {
		g.waiting = append(g.waiting, s)
		s.place = len(g.waiting)
	}
}

// leave ends the wait of a subscription.
func (g *ring) leave(s *Subscription) {
	if s.place == 0 {
		return
	}
	last := g.waiting[len(g.waiting)-1]
	g.waiting[s.place-1], last.place = last, s.place
	g.waiting[len(g.waiting)-1] = nil
	g.waiting = g.waiting[:len(g.waiting)-1]
	s.place = 0
}

// forget drops the events up to a position. The horizon may be within a revision: the newest event stays (trim).
func (g *ring) forget(up events.Position) {
	g.DropWhile(func(e *Event) bool { return !up.Before(e.At()) })
}

// reset overruns every cursor and wakes the watches.
func (g *ring) reset() {
	g.Reset()
	g.notify()
}

// Trigger selects part of a resource's events: those of objects with a value in a field, before or after the event.
// Because of it an event wakes only the watches of its triggers, not all watches of the resource.
type Trigger struct{ Field, Value string }

// Trigger fields that are not selectable fields.
const (
	// ByKey is the object's key, in etcd's order.
	ByKey = "\x00key"
	// ByNamespace is the object's namespace.
	ByNamespace = "\x00namespace"
)

func (t Trigger) valueOf(i *Item) string {
	switch t.Field {
	case ByKey:
		return i.Key
	case ByNamespace:
		return i.Namespace
	}
	return i.Field(t.Field)
}

// Index returns the selectable field that finds the trigger's objects. It is empty if the key order finds them.
func (t Trigger) Index() string {
	if t.Field == ByKey || t.Field == ByNamespace {
		return ""
	}
	return t.Field
}

func (t Trigger) matches(e *Event) bool {
	return t.valueOf(e.Item) == t.Value || e.Previous != nil && t.valueOf(e.Previous) == t.Value
}

// triggerRing is the ring of one trigger. It exists while the trigger has subscribers.
type triggerRing struct {
	ring
	subscribers int
}

// Subscription reads a resource's events, or the events of one trigger.
type Subscription struct {
	resource *Resource
	trigger  Trigger
	ring     *ring
	// differences is the resource's number of differences when the subscription began.
	differences int
	// wake is the callback of Await, and place the place in ring.waiting, from 1. 0: it is not there.
	wake  func()
	place int
}

// Subscribe subscribes to a trigger's events; the zero trigger selects every event. The caller must call Close.
func (r *Resource) Subscribe(t Trigger) *Subscription {
	r.mu.Lock()
	r.subscribers++
	if t == (Trigger{}) {
		defer r.mu.Unlock()
		return &Subscription{resource: r, ring: &r.events, differences: r.differences}
	}
	if trigger := r.triggers[t]; trigger != nil {
		defer r.mu.Unlock()
		return r.join(t, trigger)
	}
	past, next := r.events.All(), r.events.Next()
	r.mu.Unlock()
	var matching []*Event // the scan of the whole ring holds no lock
	for _, e := range past {
		if t.matches(e) {
			matching = append(matching, e)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	trigger := r.triggers[t]
	if trigger == nil {
		trigger = &triggerRing{}
		if r.events.Base() <= next { // otherwise the ring was reset meanwhile, or has dropped the scanned events
			for _, e := range matching {
				trigger.Add(e)
			}
		} else {
			next = r.events.Base()
		}
		for _, e := range r.events.From(next) {
			if t.matches(e) {
				trigger.Add(e)
			}
		}
		trigger.forget(r.horizon.Low)
		r.triggers[t] = trigger
		r.triggerFields[t.Field]++
	}
	return r.join(t, trigger)
}

func (r *Resource) join(t Trigger, trigger *triggerRing) *Subscription {
	trigger.subscribers++
	return &Subscription{resource: r, trigger: t, ring: &trigger.ring, differences: r.differences}
}

// Close ends the subscription. The caller must not call Await afterwards.
func (s *Subscription) Close() {
	r := s.resource
	r.mu.Lock()
	defer r.mu.Unlock()
	s.ring.leave(s)
	r.subscribers--
	r.lastUsed = time.Now()
	if trigger := r.triggers[s.trigger]; trigger != nil {
		if trigger.subscribers--; trigger.subscribers == 0 {
			delete(r.triggers, s.trigger)
			if r.triggerFields[s.trigger.Field]--; r.triggerFields[s.trigger.Field] == 0 {
				delete(r.triggerFields, s.trigger.Field)
			}
		}
	}
}

// dispatchToTriggers adds an event to the triggers that select it.
func (r *Resource) dispatchToTriggers(e *Event) {
	r.eachTrigger(e, func(t *triggerRing) {
		t.Add(e)
		t.notify()
	})
}

// eachTrigger calls fn for the triggers that select an event. It finds them by the event's values, so its cost does not
// depend on the number of triggers.
func (r *Resource) eachTrigger(e *Event, fn func(*triggerRing)) {
	for field := range r.triggerFields {
		t := Trigger{Field: field}
		t.Value = t.valueOf(e.Item)
		if trigger := r.triggers[t]; trigger != nil {
			fn(trigger)
		}
		if e.Previous == nil {
			continue
		}
		before := Trigger{Field: field}
		before.Value = before.valueOf(e.Previous)
		if trigger := r.triggers[before]; trigger != nil && before != t {
			fn(trigger)
		}
	}
}

// Cursor is a place between two events of a subscription.
type Cursor int64

// After returns the cursor after an event's position. ok is false if the ring has dropped events after it; low is the
// oldest revision that a watch can resume from.
func (s *Subscription) After(revision int64, index int32) (cur Cursor, low int64, ok bool) {
	r := s.resource
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	after, low := events.Position{Revision: revision, Index: index}, r.horizon.Low.Revision
	if !r.horizon.Holds(after) {
		return 0, low, false
	}
	s.ring.forget(r.horizon.Low)
	return Cursor(s.ring.After(after)), low, true
}

// Next returns at most n events after the cursor, and the cursor after them. changed is closed when another event
// arrives, and progress is the revision reached with the events: 0 before the cache has read the log. If more events
// follow already, changed is nil and progress 0. ok is false if the ring overran the cursor.
func (s *Subscription) Next(cur Cursor,
	n int) (batch []*Event, next Cursor, progress int64, changed <-chan struct{}, ok bool) {
	r := s.resource
	r.cache.resetMu.RLock()
	defer r.cache.resetMu.RUnlock()
	progress = r.cache.progress.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	s.ring.forget(r.horizon.Low)
	rest, more, ok := s.ring.Read(int64(cur), n)
	if !ok {
		return nil, cur, 0, nil, false
	}
	rest, next = slices.Clone(rest), cur+Cursor(len(rest))
	if more {
		return rest, next, 0, nil, true
	}
	return rest, next, progress, s.ring.changed.C(), true
}

// Await lets the next event after a cursor, or a reset, call wake once. It replaces the channel of Next for a watch
// without a goroutine. wake must not block, and must not call the subscription. It may be called after Close. Await
// returns false if there is such an event already.
func (s *Subscription) Await(cur Cursor, wake func()) bool {
	s.resource.mu.Lock()
	defer s.resource.mu.Unlock()
	if s.ring.Next() != int64(cur) {
		return false
	}
	s.wake = wake
	s.ring.await(s)
	return true
}

// Behind returns the number of events after a cursor.
func (s *Subscription) Behind(cur Cursor) int64 {
	s.resource.mu.Lock()
	defer s.resource.mu.Unlock()
	return max(0, s.ring.Next()-int64(cur))
}
