// Package tail keeps the end of the event log for the readers within registry: its own informers, and the watches of
// authn, authz and admission.
package tail

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchable"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Tail is the end of the event log, read once for all who read it here.
type Tail struct {
	mu sync.Mutex
	// rings are the events of each stored resource, and bytes what all of them take.
	rings map[string]*ring
	bytes int
	// Events after low are in the rings, but for what those say is gone. Everything up to high has come.
	low, high int64
	history   string
	started   bool
	// Foreign, if set, is called when the log goes on with another history of etcd: revisions mean something else from
	// then on. It must not wait.
	Foreign func()
	// Written, if set, is called with each event. It must not wait.
	Written func(*logv1.Event)
	// epoch counts how often everything was dropped.
	epoch int
	// behind is since when the tail stands at was though etcd has more; the zero time where it had all when it was last
	// compared.
	behind time.Time
	was    int64
	// caughtUp is when etcd's revision was asked for that the tail has reached; asked and revision are of the next one.
	caughtUp, asked time.Time
	revision        int64
}

// ring is the newest events of one stored resource.
type ring struct {
	events.Ring[*logv1.Event]
	bytes int
	// gone is the newest event that is kept no longer.
	gone events.Position
	// redefined is since when objects are read as they are now: their definition changed.
	redefined int64
	changed   watchable.Signal
}

const (
	// tailBytes bounds the events that are kept, of all resources together, but for the newest one; those of whichever
	// takes most are given up first.
	tailBytes = 8 << 20
	// ComparePeriod is how often the tail is compared with etcd.
	ComparePeriod = time.Second
	// stalledAfter is for how long the log may not bring what etcd has, until readers are sent to another registry.
	stalledAfter = 3 * time.Second
)

// ErrExpired ends a reading whose next events are not kept any more, or whose resource is to be read anew.
var ErrExpired = errors.New("what comes next is no longer kept")

// New returns a tail that has read nothing yet.
func New() *Tail { return &Tail{rings: map[string]*ring{}} }

// Begin makes ready for a reader that begins anew, at the log's beginning: what follows now may be cut off from what
// was kept.
func (t *Tail) Begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(0)
	t.started = false
}

// drop forgets every event; those after low are to come. Whoever was reading is overrun.
func (t *Tail) drop(low int64) {
	t.epoch++
	t.bytes, t.low, t.high = 0, low, low
	for _, r := range t.rings {
		r.Drop(r.Len())
		r.bytes, r.gone = 0, events.Position{}
		r.changed.Notify()
	}
}

// ring is a resource's, made where there is none. The lock is held.
func (t *Tail) ring(storedAs string) *ring {
	r := t.rings[storedAs]
	if r == nil {
		r = &ring{}
		t.rings[storedAs] = r
	}
	return r
}

// Append adds the log's next message.
func (t *Tail) Append(e *logv1.Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	event := e.Type != logv1.Type_TYPE_UNSPECIFIED && (e.Type != logv1.Type_TYPE_RESET || e.StorageResource != "")
	foreign := e.Epoch != "" && t.history != "" && e.Epoch != t.history
	switch {
	case t.started && events.IsRefill(e, t.history, t.high):
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
	if e.Epoch != "" {
		t.history = e.Epoch
	}
	if foreign {
		for _, r := range t.rings {
			r.redefined = 0
		}
		if t.Foreign != nil {
			t.Foreign()
		}
	}
	if !event {
		t.high = max(t.high, e.Revision)
		for _, r := range t.rings { // somebody may be due to be told
			r.changed.Notify()
		}
		return nil
	}
	// What is published again, after the log had lost its end, is here already.
	if e.Revision > t.high || e.Revision == t.high && e.Type == logv1.Type_TYPE_RESET {
		t.add(e)
	}
	return nil
}

func (t *Tail) add(e *logv1.Event) {
	if t.Written != nil {
		t.Written(e)
	}
	r := t.ring(e.StorageResource)
	if e.CrdChanged {
		r.redefined = max(r.redefined, e.Revision)
	}
	r.Add(e)
	n := proto.Size(e)
	r.bytes, t.bytes = r.bytes+n, t.bytes+n
	if !e.More {
		t.high = max(t.high, e.Revision)
	}
	r.changed.Notify()
	for t.bytes-n > tailBytes {
		t.evict(e)
	}
}

// evict gives up the oldest event of the resource that takes most, but for the newest of all, which somebody is to
// read.
func (t *Tail) evict(newest *logv1.Event) {
	var most *ring
	for _, r := range t.rings {
		if r.Len() > 0 && r.Oldest() != newest && (most == nil || r.bytes > most.bytes) {
			most = r
		}
	}
	e := most.Oldest()
	n := proto.Size(e)
	most.bytes, t.bytes = most.bytes-n, t.bytes-n
	most.gone = events.PositionOf(e)
	most.Drop(1)
}

// At is how far the tail has come, and in which history of etcd.
func (t *Tail) At() (revision int64, history string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.high, t.history
}

// DefinedAt is since when objects of a stored resource are read as they are now; 0: for as long as is known.
func (t *Tail) DefinedAt(storedAs string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ring(storedAs).redefined
}

// Stalled says whether the log has not brought what etcd has for long.
func (t *Tail) Stalled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	moves := t.high != t.was // one that is late, and comes, is not stalled
	return !t.behind.IsZero() && !moves && time.Since(t.behind) > stalledAfter
}

// freshFor is how old what the tail tells may be for whoever decides by it.
const freshFor = 4 * ComparePeriod

// Fresh says whether the tail has come as far as etcd was a moment ago.
func (t *Tail) Fresh() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reach()
	return time.Since(t.caughtUp) < freshFor
}

// reach notes that the tail has come to where etcd was when it was asked. The lock is held.
func (t *Tail) reach() {
	if t.high >= t.revision && t.asked.After(t.caughtUp) {
		t.caughtUp = t.asked
	}
}

// Compare compares the tail with etcd's revision every ComparePeriod until ctx is done. Where the log lags it calls
// ask, which has the publisher say how far it is: readers tell by it how fresh they are.
func (t *Tail) Compare(ctx context.Context, etcd func(context.Context) (int64, error), ask func() error) error {
	tick := time.NewTicker(ComparePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		asked := time.Now()
		one, cancel := context.WithTimeout(ctx, ComparePeriod)
		now, err := etcd(one)
		cancel()
		if err != nil { // nobody can say
			continue
		}
		t.mu.Lock()
		if t.reach(); !t.asked.After(t.caughtUp) {
			t.asked, t.revision = asked, now
			t.reach()
		}
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

// Reading reads the events of one stored resource from a place on: those after it.
type Reading struct {
	tail *Tail
	ring *ring
	// at is the place of the newest event that was read.
	at    events.Position
	next  int64 // the sequence of the next event; -1 before the first reading
	epoch int
}

// Read begins to read a stored resource's events after a place.
func (t *Tail) Read(storedAs string, after events.Position) *Reading {
	t.mu.Lock()
	defer t.mu.Unlock()
	return &Reading{
		tail: t,
		ring: t.ring(storedAs),
		at:   after,
		next: -1,
	}
}

// Next answers what has come since it was called last, and up to which revision that is everything: 0 before the log
// has been read at all. changed is closed when there are more events. ErrExpired: the reading is at its end.
func (f *Reading) Next() (came []*logv1.Event, high int64, changed <-chan struct{}, err error) {
	t, r := f.tail, f.ring
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.started && f.next < 0 {
		return nil, 0, r.changed.C(), nil
	}
	if f.at.DifferentEpoch(events.Position{Epoch: t.history}) || f.next >= 0 && f.epoch != t.epoch {
		return nil, 0, nil, ErrExpired
	}
	if f.next < 0 {
		after := f.at.Revision
		if f.at.Index != events.LastIndex {
			after-- // its transaction may hold more
		}
		if after < t.low {
			return nil, 0, nil, ErrExpired
		}
		f.epoch, f.at.Epoch = t.epoch, t.history
		f.next = r.Search(func(e *logv1.Event) bool { return e.Revision > after })
	}
	if f.next <= r.Base() && f.at.Before(r.gone) {
		return nil, 0, nil, ErrExpired
	}
	for _, e := range r.From(f.next) {
		if !f.at.Before(events.PositionOf(e)) {
			continue
		}
		if e.Type == logv1.Type_TYPE_RESET {
			err = ErrExpired // after what has come before it
			break
		}
		came = append(came, e)
		f.at.Revision, f.at.Index = e.Revision, e.Index
	}
	f.next = r.Next()
	return came, t.high, r.changed.C(), err
}

// History is that of etcd which the reading is of; empty before anything is known.
func (f *Reading) History() string { return f.at.Epoch }

// Each calls handle with every event until ctx is done, handle fails, or the reading is at its end.
func (f *Reading) Each(ctx context.Context, handle func(*logv1.Event) error) error {
	for {
		came, _, changed, err := f.Next()
		for _, e := range came {
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
