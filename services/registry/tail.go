package registry

import (
	"context"
	"errors"
	"sort"
	"sync"

	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// tail is the end of the event log, for registry's own informers: all of them share one reader.
type tail struct {
	mu      sync.Mutex
	ring    []*logv1.Event
	bytes   int
	base    int64 // the sequence of ring[0]
	low     int64 // events after this revision are all in the ring
	started bool
	changed chan struct{}
}

// tailBytes bounds the events that are kept.
const tailBytes = 8 << 20

var errOverrun = errors.New("what comes next is no longer kept")

func newTail() *tail { return &tail{changed: make(chan struct{})} }

// begin makes ready for a reader that begins anew, at the log's beginning: what follows now may be cut off from what was kept.
func (t *tail) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.base += int64(len(t.ring)) + 1
	t.ring, t.bytes, t.started = nil, 0, false
	close(t.changed)
	t.changed = make(chan struct{})
}

// take adds the log's next message.
func (t *tail) take(e *logv1.Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case e.Type == logv1.Type_TYPE_RESET && e.StoredAs != "" && t.started: // in its place among the events, for those it is for
	case e.Type == logv1.Type_TYPE_RESET:
		t.base += int64(len(t.ring)) + 1
		t.ring, t.bytes, t.low, t.started = nil, 0, e.Revision, true
	case !t.started:
		t.started, t.low = true, e.Revision
		if e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Index == 0 {
			t.low--
		}
	}
	if e.Type != logv1.Type_TYPE_UNSPECIFIED && (e.Type != logv1.Type_TYPE_RESET || e.StoredAs != "" && t.started) {
		t.ring = append(t.ring, e)
		t.bytes += proto.Size(e)
		for len(t.ring) > 1 && (t.bytes > tailBytes || t.ring[0].Revision == t.low) {
			t.low = t.ring[0].Revision
			t.bytes -= proto.Size(t.ring[0])
			t.ring[0] = nil
			t.ring = t.ring[1:]
			t.base++
		}
	}
	close(t.changed)
	t.changed = make(chan struct{})
	return nil
}

// follow calls each with every event of a stored resource after a revision, until ctx is done, each fails, or what
// comes next is no longer kept.
func (t *tail) follow(ctx context.Context, after int64, storedAs string, each func(*logv1.Event) error) error {
	next := int64(-1)
	for {
		t.mu.Lock()
		if next < 0 && t.started {
			if after < t.low {
				t.mu.Unlock()
				return errOverrun
			}
			next = t.base + int64(sort.Search(len(t.ring), func(i int) bool { return t.ring[i].Revision > after }))
		}
		if next >= 0 && next < t.base {
			t.mu.Unlock()
			return errOverrun
		}
		var events []*logv1.Event
		if next >= 0 {
			events = append(events, t.ring[next-t.base:]...)
			next = t.base + int64(len(t.ring))
		}
		changed := t.changed
		t.mu.Unlock()
		for _, e := range events {
			if e.StoredAs != storedAs || e.Revision <= after {
				continue
			}
			if e.Type == logv1.Type_TYPE_RESET {
				return errOverrun
			}
			if err := each(e); err != nil {
				return err
			}
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
