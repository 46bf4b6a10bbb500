// Package history is what clients did and saw while processes were killed, paused and cut off, and the judge of it.
//
// The judge knows what happened from etcd itself: the sequence of all changes. Against that it holds every answer that
// a client was given, and when.
package history

import (
	"sync"
	"time"
)

// Outcome is what a client knows of a write.
type Outcome int

const (
	// Unknown: no answer, or one that leaves open whether it was done.
	Unknown Outcome = iota
	// Acknowledged: the answer says that it was done.
	Acknowledged
	// Refused: the answer says that it was not done.
	Refused
)

// Write is one attempt to change an object. Times count from the history's beginning.
type Write struct {
	Verb, Key string
	// Value is what only this write writes; empty for a deletion.
	Value string
	// Expect is the resourceVersion that the object has to have; 0 for any.
	Expect     int64
	Begin, End time.Duration
	Outcome    Outcome
	Code       int
	// Revision is the answer's resourceVersion; 0 where it has none.
	Revision int64
}

// Item is one object as a client was shown it.
type Item struct {
	Key      string
	Revision int64
	Value    string
	Shard    string
}

// Read is an answered get or list.
type Read struct {
	// Key is the object's of a get.
	Key string
	// Shard is the label that a list selects; empty for all.
	Shard string
	// Any: the list asked for no particular freshness (resourceVersion=0).
	Any        bool
	Begin, End time.Duration
	// Revision is the list's.
	Revision int64
	Items    []Item
}

// Frame is one event of a watch.
type Frame struct {
	Type string
	Item Item
	// InitialEnd: the bookmark that ends the initial events.
	InitialEnd bool
	At         time.Duration
}

// Segment is one connection's share of a watch.
type Segment struct {
	Shard string
	// Start is the revision after which events were asked for. Initial: all objects first.
	Start   int64
	Initial bool
	Begin   time.Duration
	Frames  []Frame
}

// Change is one event of etcd. For a deletion Value and Shard are those of the last state.
type Change struct {
	Revision int64
	Type     string
	Key      string
	Value    string
	Shard    string
}

// History is a whole run.
type History struct {
	mu       sync.Mutex
	began    time.Time
	Writes   []Write
	Reads    []Read
	Segments []*Segment
	Changes  []Change
}

// New begins a history now.
func New() *History { return &History{began: time.Now()} }

// Now is the time since the beginning.
func (h *History) Now() time.Duration { return time.Since(h.began) }

// Wrote records a write.
func (h *History) Wrote(w Write) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Writes = append(h.Writes, w)
}

// Saw records a read.
func (h *History) Saw(r Read) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Reads = append(h.Reads, r)
}

// Watched records a segment that is over.
func (h *History) Watched(s *Segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Segments = append(h.Segments, s)
}
