// Package history records the requests and responses of clients during faults, and checks them.
//
// The checker gets the sequence of all changes from etcd. It compares every response, and its time, with that sequence.
// A History may be recorded from many goroutines. Check must run after they have ended.
package history

import (
	"sync"
	"time"
)

// Outcome is a write's outcome, as far as the client can determine it.
type Outcome int

const (
	// Unknown: no response, or a response that does not determine whether the write happened.
	Unknown Outcome = iota
	// Acknowledged: the response confirms the write.
	Acknowledged
	// Refused: the response confirms that the write did not happen.
	Refused
)

// Write is one attempt to change an object. Times are durations since the history's start.
type Write struct {
	Verb, Key string
	// Value is unique to this write; empty for a deletion.
	Value string
	// Expect is the precondition on resourceVersion; 0 for none.
	Expect     int64
	Begin, End time.Duration
	Outcome    Outcome
	Code       int
	// Revision is the response's resourceVersion; 0 if it has none.
	Revision int64
}

// Item is an object as a response contains it.
type Item struct {
	Key      string
	Revision int64
	Value    string
	Shard    string
}

// Read is a successful get or list.
type Read struct {
	// Key is the key of a get; empty for a list.
	Key string
	// Shard is the label that a list selects; empty for all objects.
	Shard string
	// Any means resourceVersion=0: the list may return any revision.
	Any bool
	// NotOlderThan is the revision that the list must have reached, and Exact the revision that it must have. 0: the
	// list must have every revision that a client knew before, unless Any is true.
	NotOlderThan, Exact int64

	Begin, End time.Duration
	// Revision is the list's revision.
	Revision int64
	Items    []Item
}

// Frame is one event of a watch.
type Frame struct {
	Type string
	Item Item
	// InitialEnd marks the bookmark that ends the initial events.
	InitialEnd bool
	At         time.Duration
}

// Segment is the part of a watch on one connection.
type Segment struct {
	// Key is the only object that the watch selects; empty for all objects. Shard is the label that it selects.
	Key, Shard string
	// Start is the revision after which the watch starts. Initial means that the watch requests initial events.
	Start   int64
	Initial bool
	Begin   time.Duration
	Frames  []Frame
}

// Change is one event of etcd. Value and Shard of a deletion are those of the last state.
type Change struct {
	Revision int64
	Type     string
	Key      string
	Value    string
	Shard    string
}

// History is the record of a run.
type History struct {
	mu       sync.Mutex
	began    time.Time
	Writes   []Write
	Reads    []Read
	Segments []*Segment
	Changes  []Change
}

// New returns a history that starts now.
func New() *History { return &History{began: time.Now()} }

// Now returns the time since the history's start.
func (h *History) Now() time.Duration { return time.Since(h.began) }

// Time returns the time of a duration since the history's start.
func (h *History) Time(at time.Duration) time.Time { return h.began.Add(at) }

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

// Watched records a finished segment.
func (h *History) Watched(s *Segment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Segments = append(h.Segments, s)
}
