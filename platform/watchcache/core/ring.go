package core

import "watershed.dev/platform/events"

// Event is an event with a position.
type Event interface{ At() events.Position }

// Events is the recent events of a resource, or of a part of it that watches select. A cursor is a place between two.
type Events[E Event] struct{ events.Ring[E] }

// After returns the cursor after a position.
func (r *Events[E]) After(p events.Position) int64 {
	return r.Search(func(e E) bool { return p.Before(e.At()) })
}

// Read returns at most n events after a cursor; more is true if more follow. The slice is shared: clone it before
// releasing the lock. ok is false if the cursor is overrun: its next event was dropped.
func (r *Events[E]) Read(cursor int64, n int) (batch []E, more, ok bool) {
	if cursor < r.Base() {
		return nil, false, false
	}
	if batch = r.From(cursor); len(batch) > n {
		return batch[:n], true, true
	}
	return batch, false, true
}

// Horizon is how far back the events of a resource reach.
type Horizon struct {
	// Low is the position of the last dropped event. All later events are held. Resets counts the resets.
	Low    events.Position
	Resets int64
}

// NewHorizon returns a horizon after which all events will be held.
func NewHorizon(revision int64) Horizon {
	return Horizon{Low: events.Position{Revision: revision, Index: events.LastIndex}}
}

// Reset moves the horizon to a revision, because events up to it may be missing.
func (h *Horizon) Reset(revision int64) { h.Low, h.Resets = NewHorizon(revision).Low, h.Resets+1 }

// Holds returns whether all events after a position are held.
func (h *Horizon) Holds(after events.Position) bool { return !after.Before(h.Low) }

// HoldsSince returns whether all events after a revision are held, and have been since a number of resets. Objects read
// at the revision are then current once the events after it are applied.
func (h *Horizon) HoldsSince(revision, resets int64) bool {
	return h.Low.Revision <= revision && h.Resets == resets
}

// Bound bounds the bytes of a resource's events.
type Bound struct {
	Bytes int64
	// Loading: the objects are being read, and the events after LoadFrom are needed. They have LoadBytes.
	Loading             bool
	LoadFrom, LoadBytes int64
}

// MustDrop returns whether the oldest event of some bytes of events, of a revision, must be dropped. All events of a
// revision are dropped together.
func (h *Horizon) MustDrop(oldest, bytes int64, b Bound) bool {
	if b.Loading && oldest > b.LoadFrom && bytes <= b.LoadBytes {
		return false
	}
	return bytes > b.Bytes || oldest == h.Low.Revision
}
