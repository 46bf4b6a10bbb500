package registry

import (
	"context"
	"errors"
	"sort"
	"sync"

	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// tail is the end of the event log, for registry's own informers and for the services that decide: all of them share one reader.
type tail struct {
	mu      sync.Mutex
	ring    []*logv1.Event
	bytes   int
	base    int64 // the sequence of ring[0]
	low     int64 // events after this revision are all in the ring
	high    int64 // everything up to this revision has come
	history string
	started bool
	changed chan struct{}
}

// tailBytes bounds the events that are kept.
const tailBytes = 8 << 20

// errOverrun ends a reading whose next events are not kept any more, or whose resource is to be read anew.
var errOverrun = errors.New("what comes next is no longer kept")

func newTail() *tail { return &tail{changed: make(chan struct{})} }

// begin makes ready for a reader that begins anew, at the log's beginning: what follows now may be cut off from what was kept.
func (t *tail) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(0)
	t.started = false
	t.tell()
}

// drop forgets every event; those after low are to come. Whoever was reading is overrun.
func (t *tail) drop(low int64) {
	t.base += int64(len(t.ring)) + 1
	t.ring, t.bytes, t.low, t.high = nil, 0, low, low
}

func (t *tail) tell() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// take adds the log's next message.
func (t *tail) take(e *logv1.Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.tell()
	event := e.Type != logv1.Type_TYPE_UNSPECIFIED && (e.Type != logv1.Type_TYPE_RESET || e.StoredAs != "")
	foreign := e.History != "" && t.history != "" && e.History != t.history
	switch {
	case e.Type == logv1.Type_TYPE_RESET && !event:
		t.drop(e.Revision)
	case !t.started, foreign: // the log's beginning is gone
		low := e.Revision
		if event && e.Index == 0 {
			low--
		}
		t.drop(low)
	}
	t.started = true
	if e.History != "" {
		t.history = e.History
	}
	if !event {
		t.high = max(t.high, e.Revision)
		return nil
	}
	if e.Revision < t.high || e.Revision == t.high && e.Type != logv1.Type_TYPE_RESET { // published again, after the log had lost its end
		return nil
	}
	t.ring = append(t.ring, e)
	t.bytes += proto.Size(e)
	if !e.More {
		t.high = max(t.high, e.Revision)
	}
	for len(t.ring) > 1 && (t.bytes > tailBytes || t.ring[0].Revision == t.low) {
		t.low = t.ring[0].Revision
		t.bytes -= proto.Size(t.ring[0])
		t.ring[0] = nil
		t.ring = t.ring[1:]
		t.base++
	}
	return nil
}

// at is how far the tail has come, and in which history of etcd.
func (t *tail) at() (revision int64, history string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.high, t.history
}

// follower reads the events of one stored resource from a place on: those after (revision, index).
type follower struct {
	*tail
	storedAs string
	revision int64
	index    int32
	next     int64 // the sequence of the next event; -1 before the first reading
}

// wholly is an index past every event of a revision.
const wholly = 1<<31 - 1

func (t *tail) follow(storedAs string, revision int64, index int32) *follower {
	return &follower{tail: t, storedAs: storedAs, revision: revision, index: index, next: -1}
}

// read answers what has come since it was called last, and up to which revision that is everything: 0 before the log has been read at
// all. changed is closed when there is more. errOverrun: the reading is at its end.
func (f *follower) read() (events []*logv1.Event, high int64, changed <-chan struct{}, err error) {
	t := f.tail
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.next < 0 && t.started {
		after := f.revision
		if f.index != wholly {
			after-- // its transaction may hold more
		}
		if after < t.low {
			return nil, 0, nil, errOverrun
		}
		f.next = t.base + int64(sort.Search(len(t.ring), func(i int) bool { return t.ring[i].Revision > after }))
	}
	if f.next < 0 {
		return nil, 0, t.changed, nil
	}
	if f.next < t.base {
		return nil, 0, nil, errOverrun
	}
	for _, e := range t.ring[f.next-t.base:] {
		if e.StoredAs != f.storedAs || e.Revision < f.revision || e.Revision == f.revision && e.Index <= f.index {
			continue
		}
		if e.Type == logv1.Type_TYPE_RESET {
			err = errOverrun // after what has come before it
			break
		}
		events = append(events, e)
		f.revision, f.index = e.Revision, e.Index
	}
	f.next = t.base + int64(len(t.ring))
	return events, t.high, t.changed, err
}

// each calls handle with every event until ctx is done, handle fails, or the reading is at its end.
func (f *follower) each(ctx context.Context, handle func(*logv1.Event) error) error {
	for {
		events, _, changed, err := f.read()
		for _, e := range events {
			if err := handle(e); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
