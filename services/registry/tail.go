package registry

import (
	"context"
	"errors"
	"sort"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// tail is the end of the event log, for registry's own informers and for authn, authz and admission: all of them share
// one reader.
type tail struct {
	mu sync.Mutex
	// rings are the events of each stored resource, and bytes what all of them take.
	rings map[string]*ring
	bytes int
	// Events after low are in the rings, but for what those say is gone. Everything up to high has come.
	low, high int64
	history   string
	started   bool
	// epoch counts how often everything was dropped.
	epoch int
	// behind is since when the tail stands at was though etcd has more; the zero time where it had all when it was last compared.
	behind time.Time
	was    int64
}

// ring is the newest events of one stored resource.
type ring struct {
	events []*logv1.Event
	base   int64 // the sequence of events[0]
	bytes  int
	// gone is the newest event that is kept no longer.
	gone place
	// redefined is since when objects are read as they are now: their definition changed.
	redefined int64
	changed   chan struct{}
}

// place is an event's place in etcd's history.
type place struct {
	revision int64
	index    int32
}

func placeOf(e *logv1.Event) place { return place{e.Revision, e.Index} }

func (p place) before(q place) bool {
	return p.revision < q.revision || p.revision == q.revision && p.index < q.index
}

const (
	// tailBytes bounds the events that are kept, of all resources together, but for the newest one; those of whichever
	// takes most are given up first.
	tailBytes = 8 << 20
	// lastIndex is past every event of a revision.
	lastIndex = 1<<31 - 1
	// comparePeriod is how often the tail is compared with etcd.
	comparePeriod = time.Second
	// stalledAfter is for how long the log may not bring what etcd has, until readers are sent to another registry.
	stalledAfter = 3 * time.Second
)

// errOverrun ends a reading whose next events are not kept any more, or whose resource is to be read anew.
var errOverrun = errors.New("what comes next is no longer kept")

func newTail() *tail { return &tail{rings: map[string]*ring{}} }

// begin makes ready for a reader that begins anew, at the log's beginning: what follows now may be cut off from what
// was kept.
func (t *tail) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(0)
	t.started = false
}

// drop forgets every event; those after low are to come. Whoever was reading is overrun.
func (t *tail) drop(low int64) {
	t.epoch++
	t.bytes, t.low, t.high = 0, low, low
	for _, r := range t.rings {
		r.events, r.bytes, r.gone = nil, 0, place{}
		r.tell()
	}
}

// ring is a resource's, made where there is none. The lock is held.
func (t *tail) ring(storedAs string) *ring {
	r := t.rings[storedAs]
	if r == nil {
		r = &ring{changed: make(chan struct{})}
		t.rings[storedAs] = r
	}
	return r
}

func (r *ring) tell() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// take adds the log's next message.
func (t *tail) take(e *logv1.Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
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
		for _, r := range t.rings { // somebody may be due to be told
			r.tell()
		}
		return nil
	}
	// What is published again, after the log had lost its end, is here already.
	if e.Revision > t.high || e.Revision == t.high && e.Type == logv1.Type_TYPE_RESET {
		t.add(e)
	}
	return nil
}

func (t *tail) add(e *logv1.Event) {
	r := t.ring(e.StoredAs)
	if e.Redefined {
		r.redefined = max(r.redefined, e.Revision)
	}
	r.events = append(r.events, e)
	n := proto.Size(e)
	r.bytes, t.bytes = r.bytes+n, t.bytes+n
	if !e.More {
		t.high = max(t.high, e.Revision)
	}
	r.tell()
	for t.bytes-n > tailBytes {
		t.evict(e)
	}
}

// evict gives up the oldest event of the resource that takes most, but for the newest of all, which somebody is to read.
func (t *tail) evict(newest *logv1.Event) {
	var most *ring
	for _, r := range t.rings {
		if len(r.events) > 0 && r.events[0] != newest && (most == nil || r.bytes > most.bytes) {
			most = r
		}
	}
	e := most.events[0]
	n := proto.Size(e)
	most.bytes, t.bytes = most.bytes-n, t.bytes-n
	most.gone = placeOf(e)
	most.events[0] = nil
	most.events = most.events[1:]
	most.base++
}

// at is how far the tail has come, and in which history of etcd.
func (t *tail) at() (revision int64, history string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.high, t.history
}

// definedAt is since when objects of a stored resource are read as they are now; 0: for as long as is known.
func (t *tail) definedAt(storedAs string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ring(storedAs).redefined
}

// stalled says whether the log has not brought what etcd has for long.
func (t *tail) stalled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.behind.IsZero() && t.high == t.was && time.Since(t.behind) > stalledAfter // one that is late, and comes, is not stalled
}

// compare compares the tail with etcd until ctx is done, and has the publisher asked how far it is where etcd has gone
// on by what is in no log: readers tell by it how fresh they are.
func (t *tail) compare(ctx context.Context, etcd func(context.Context) (int64, error), ask func() error) error {
	tick := time.NewTicker(comparePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		asked := time.Now()
		one, cancel := context.WithTimeout(ctx, comparePeriod)
		now, err := etcd(one)
		cancel()
		if err != nil { // nobody can say
			continue
		}
		t.mu.Lock()
		late := t.high < now
		switch {
		case !late:
			t.behind = time.Time{}
		case t.behind.IsZero() || t.high != t.was:
			t.behind, t.was = asked, t.high
		}
		t.mu.Unlock()
		if late {
			_ = ask() // again in a moment, where it fails
		}
	}
}

// follower reads the events of one stored resource from a place on: those after it.
type follower struct {
	tail *tail
	ring *ring
	// at is the place of the newest event that was read, in a history; "": none is known yet.
	at      place
	history string
	next    int64 // the sequence of the next event; -1 before the first reading
	epoch   int
}

// follow begins to read after a place. history is what the place is of; empty where nobody has said.
func (t *tail) follow(storedAs string, at place, history string) *follower {
	t.mu.Lock()
	defer t.mu.Unlock()
	return &follower{tail: t, ring: t.ring(storedAs), at: at, history: history, next: -1}
}

// read answers what has come since it was called last, and up to which revision that is everything: 0 before the log
// has been read at all. changed is closed when there are more events. errOverrun: the reading is at its end.
func (f *follower) read() (events []*logv1.Event, high int64, changed <-chan struct{}, err error) {
	t, r := f.tail, f.ring
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.started && f.next < 0 {
		return nil, 0, r.changed, nil
	}
	if f.history != "" && t.history != "" && f.history != t.history || f.next >= 0 && f.epoch != t.epoch {
		return nil, 0, nil, errOverrun
	}
	if f.next < 0 {
		after := f.at.revision
		if f.at.index != lastIndex {
			after-- // its transaction may hold more
		}
		if after < t.low {
			return nil, 0, nil, errOverrun
		}
		f.epoch, f.history = t.epoch, t.history
		f.next = r.base + int64(sort.Search(len(r.events), func(i int) bool { return r.events[i].Revision > after }))
	}
	if f.next <= r.base && f.at.before(r.gone) {
		return nil, 0, nil, errOverrun
	}
	for _, e := range r.events[max(f.next-r.base, 0):] {
		if !f.at.before(placeOf(e)) {
			continue
		}
		if e.Type == logv1.Type_TYPE_RESET {
			err = errOverrun // after what has come before it
			break
		}
		events = append(events, e)
		f.at = placeOf(e)
	}
	f.next = r.base + int64(len(r.events))
	return events, t.high, r.changed, err
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
