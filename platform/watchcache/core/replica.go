package core

import (
	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Replica is the state of a reader that applies the log to its resources: its revision, its epoch, and the events of an
// open transaction. The zero value is a reader that has applied nothing.
type Replica struct {
	// Progress is the revision up to which every event has been applied. Only a reset of all lowers it.
	Progress int64
	// Epoch is the epoch of etcd that revisions belong to; empty if the log has not named it.
	Epoch string

	started bool
	// pending has the events of an open transaction. Events up to partial are applied already, because a
	// reset followed them.
	pending []*logv1.Event
	partial events.Position
	effects []Effect
}

// Effect is a change of a resource. Effects are applied in order, and before the new progress is shown.
type Effect struct {
	// Resource is the stored resource. Empty: all resources. The progress is then Low too.
	Resource string
	// Events are a transaction's events of the resource. If there are none, the resource is reset: events up to Low may
	// be missing.
	Events []*logv1.Event
	Low    int64
	// CRDChanged: the resource's CRD changed at CRDChangedAt, or the epoch changed, in which the old revision has no
	// meaning (0).
	CRDChanged   bool
	CRDChangedAt int64
	// Expected: the reset loses no event: the CRD changed, or the log is read for the first time.
	Expected bool
}

// Restart prepares the replica for a reader that starts at the beginning of the log. If the log does not hold the
// message after Progress any longer, its first message resets every resource.
func (c *Replica) Restart() { c.pending, c.started = nil, false }

// Apply applies the log's next event, and returns its effects, which are valid until the next call. It applies the
// events of a transaction together, when the last arrives.
//
//	progress                                 Progress advances
//	event                                    applied with its transaction; a duplicate is skipped
//	reset of a resource                      the resource is reset, in order with the events
//	reset of all, another epoch, a gap       every resource is reset; a refill of the same epoch resets none
//	first message                            every resource is reset, unless the replica has all messages before it
func (c *Replica) Apply(e *logv1.Event) []Effect {
	clear(c.effects)
	c.effects = c.effects[:0]
	switch {
	case e.Type == logv1.Type_TYPE_RESET && e.StorageResource != "" && c.started:
		// Otherwise it is a duplicate. A reset without an epoch is not of the log: an event could not be applied.
		if p := events.PositionOf(e); e.Revision >= c.Progress && (e.Epoch == "" || c.partial.Before(p)) {
			c.applyPending()
			c.effects = append(c.effects, Effect{Resource: e.StorageResource, Low: e.Revision, CRDChanged: e.CrdChanged,
				CRDChangedAt: e.Revision, Expected: e.CrdChanged})
			if c.partial.Before(p) {
				c.partial = p
			}
			c.advance(e)
		}
		return c.effects
	case c.isRefill(e):
		c.pending, c.started = nil, true // the refilled log repeats an open transaction from its start
		return nil
	case e.Type == logv1.Type_TYPE_RESET:
		c.reset(e)
		return c.effects
	case e.Epoch != "" && c.Epoch != "" && e.Epoch != c.Epoch:
		c.reset(e) // a new log whose first messages are gone
	case !c.started:
		c.start(e)
	}
	switch {
	case e.Type == logv1.Type_TYPE_UNSPECIFIED:
		c.advance(e)
	// Otherwise the log lost its end, and the publisher wrote it again.
	case e.Revision > c.Progress && c.partial.Before(events.PositionOf(e)):
		n := len(c.pending)
		for n > 0 && !events.PositionOf(c.pending[n-1]).Before(events.PositionOf(e)) {
			n-- // the publisher begins the transaction again
		}
		if c.pending = append(c.pending[:n], e); !e.More {
			c.applyPending()
			c.advance(e)
		}
	}
	return c.effects
}

// isRefill returns true if a message begins a recreated log at or before the replica's revision, in the same epoch.
// Such a reset leaves no gap: the events up to the replica's revision follow again.
func (c *Replica) isRefill(e *logv1.Event) bool {
	return e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" && e.Epoch != "" && e.Epoch == c.Epoch &&
		e.Revision <= c.Progress
}

func (c *Replica) advance(e *logv1.Event) {
	if !e.More {
		c.Progress = max(c.Progress, e.Revision)
	}
}

// start handles the first message of a log whose first messages are gone.
func (c *Replica) start(e *logv1.Event) {
	low := before(e)
	continues := e.Epoch == c.Epoch && low <= c.Progress
	c.Epoch, c.started = e.Epoch, true
	if !continues {
		c.Progress, c.partial = low, events.Position{}
		c.effects = append(c.effects, Effect{Low: low, Expected: true})
	}
}

// reset resets every resource, because events before a revision may be missing. The revision may be lower than progress
// if etcd was restored from a backup.
func (c *Replica) reset(e *logv1.Event) {
	epochChanged := c.Epoch != "" && e.Epoch != "" && c.Epoch != e.Epoch
	if e.Epoch != "" {
		c.Epoch = e.Epoch
	}
	c.pending, c.partial, c.started, c.Progress = nil, events.Position{}, true, e.Revision
	c.effects = append(c.effects, Effect{Low: e.Revision, CRDChanged: epochChanged})
}

// applyPending adds the effects of the open transaction, a batch for each resource.
func (c *Replica) applyPending() {
	pending := c.pending
	if c.pending = nil; len(pending) == 1 { // the effects are valid until the next call, which reuses the slice
		c.pending = pending[:0]
	}
	for len(pending) > 0 {
		name, n := pending[0].StorageResource, 0
		for i, p := range pending { // the resource's events first, in order
			if p.StorageResource == name {
				copy(pending[n+1:i+1], pending[n:i])
				pending[n] = p
				n++
			}
		}
		c.effects = append(c.effects, Effect{Resource: name, Events: pending[:n:n]})
		pending = pending[n:]
	}
}
