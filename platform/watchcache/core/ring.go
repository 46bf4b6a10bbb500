package core

import (
	"watershed.dev/platform/events"
)

// Event is an event in a ring.
type Event interface{ At() events.Position }

// Ring is a resource's recent events, and how far back a watch can resume. The caller's lock guards it.
type Ring[E Event] struct {
	events.Ring[E]
	// low is the position of the last event that the ring has dropped. The ring has all later events.
	low events.Position
	// resets counts the resets.
	resets int64
}

// NewRing returns a ring that will have all events after a revision.
func NewRing[E Event](low int64) Ring[E] {
	return Ring[E]{low: events.Position{Revision: low, Index: events.LastIndex}}
}

// Low returns the oldest revision that a watch can resume from.
func (r *Ring[E]) Low() int64 { return r.low.Revision }

// Resets returns the number of resets.
func (r *Ring[E]) Resets() int64 { return r.resets }

// DropOldest drops the oldest event.
func (r *Ring[E]) DropOldest() E {
	e := r.Oldest()
	r.low = e.At()
	r.Drop(1)
	return e
}

// OldestDropped returns whether the oldest event is of a revision of which the ring has dropped an event. All events of
// a revision are dropped together.
func (r *Ring[E]) OldestDropped() bool { return r.Oldest().At().Revision == r.low.Revision }

// Forget resets the ring: events up to a revision may be missing. It overruns every cursor.
func (r *Ring[E]) Forget(low int64) {
	r.Reset()
	r.resets++
	r.low = events.Position{Revision: low, Index: events.LastIndex}
}

// Holds returns whether the ring has all events after a position.
func (r *Ring[E]) Holds(after events.Position) bool { return !after.Before(r.low) }

// After returns the cursor after a position. The ring may be a part of another (a trigger), which holds the position.
func (r *Ring[E]) After(p events.Position) int64 {
	return r.Search(func(e E) bool { return p.Before(e.At()) })
}

// DropThrough drops the events up to a revision, which another ring has dropped.
func (r *Ring[E]) DropThrough(revision int64) {
	r.DropWhile(func(e E) bool { return e.At().Revision <= revision })
}

// Read returns at most n events after a cursor; more is true if more follow. The slice is shared: clone it before
// releasing the lock. ok is false if the ring overran the cursor.
func (r *Ring[E]) Read(cursor int64, n int) (batch []E, more, ok bool) {
	if cursor < r.Base() {
		return nil, false, false
	}
	if batch = r.From(cursor); len(batch) > n {
		return batch[:n], true, true
	}
	return batch, false, true
}
