package cache

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func large(revision int64, name string, n int) *logv1.Event {
	e := event(logv1.Type_TYPE_MODIFIED, revision, name)
	e.Object.Json = []byte(`{"x":"` + strings.Repeat("x", n) + `"}`)
	return e
}

// A ring stays within its bound, including previous objects and the frames built from its events (F9).
func TestARingIsBoundedByAllThatItHolds(t *testing.T) {
	const bound = 1 << 20
	c := New(bound, 0)
	c.Apply(reset(10))
	r := c.Resource("pods")
	f := r.Subscribe(Trigger{})
	defer f.Close()
	for i := range int64(400) {
		e := large(11+i, "a", 10_000)
		e.Previous = &logv1.Object{Json: e.Object.Json, Labels: map[string]string{"a": "b"}}
		c.Apply(e)
		cur, _, ok := f.After(10+i, lastIndex)
		if !ok {
			t.Fatal("the newest event is not there")
		}
		events, _, _, _, _ := f.Next(cur, 10)
		for _, e := range events {
			for form := range 5 {
				large := func(context.Context) ([]byte, error) { return make([]byte, 20_000), nil }
				if _, err := e.Frame(t.Context(), form, large); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	c.Sweep() // the newest event's frames were built after Apply had trimmed the ring
	s := c.Resources()[0]
	if held := s.EventBytes; held > bound+200_000 || s.Events > 12 {
		t.Errorf("%d events hold %d bytes of %d", s.Events, held, bound)
	}
	held := 0
	for _, e := range r.events.All() {
		held += e.Size() + e.frames.bytes
	}
	if int64(held) != r.ringBytes.Load() {
		t.Errorf("%d bytes are held, %d are reported", held, r.ringBytes.Load())
	}
}

// Events older than eventAge occupy a share of the bound, and younger events all of it. The time is virtual.
func TestOldEventsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const bound = 1 << 20
		c := New(bound, 0)
		c.Apply(reset(10))
		held := func() int { c.Sweep(); return c.Resources()[0].EventBytes }
		revision := int64(10)
		add := func(n int) {
			for range n {
				revision++
				c.Apply(large(revision, "a", 10_000))
			}
		}
		add(50)
		for began := time.Now(); time.Since(began) < eventAge; time.Sleep(10 * time.Second) {
			if n := held(); n < 500_000 {
				t.Fatalf("%d bytes of events are held after %s", n, time.Since(began))
			}
		}
		add(20)
		time.Sleep(eventAge)
		if n := held(); n < 200_000 || n > 300_000 {
			t.Errorf("%d bytes are held: want those of the 20 younger events", n)
		}
		time.Sleep(eventAge)
		held()
		time.Sleep(eventAge)
		if n := held(); n > bound/idleShare || n < 10_000 {
			t.Errorf("%d bytes of old events are held, of %d", n, bound/idleShare)
		}
		f := c.Resource("pods").Subscribe(Trigger{})
		defer f.Close()
		if _, _, ok := f.After(revision, lastIndex); !ok {
			t.Error("a watch cannot start after the newest event")
		}
	})
}

// The newest event of a transaction beyond the bound stays for watches that have received the event before it.
func TestTheNewestEventStays(t *testing.T) {
	for name, trigger := range map[string]Trigger{"all": {}, "of a namespace": {Field: ByNamespace, Value: "ns"}} {
		c := New(1000, 0)
		c.Apply(reset(10))
		s := c.Resource("pods").Subscribe(trigger)
		defer s.Close()
		first, second := large(11, "a", 10_000), large(11, "b", 10_000)
		second.Index = 1
		c.applyTo("pods", []*logv1.Event{first, second})
		c.Sweep()
		cursor, _, ok := s.After(11, 0)
		if !ok {
			t.Fatalf("%s: no event is held", name)
		}
		if events, _, _, _, ok := s.Next(cursor, 10); !ok || len(events) != 1 || events[0].Item.Name != "b" {
			t.Errorf("%s: %v, %v: want the second event", name, events, ok)
		}
	}
}

// A load ends, however many events arrive meanwhile (F6).
func TestALoadIsNotStarvedByItsRing(t *testing.T) {
	c := New(100_000, 0)
	c.Apply(reset(10))
	began, going := make(chan struct{}), make(chan struct{})
	loads := 0
	slow := func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
		if loads++; loads == 1 {
			close(began)
		}
		<-going
		add(&registryv1.Row{Namespace: "ns", Name: "old", Json: []byte("{}")})
		return 10, nil
	}
	done := make(chan *Snapshot)
	go func() {
		s, err := c.Resource("pods").Snapshot(t.Context(), "", slow, waitFor(c))
		if err != nil {
			t.Error(err)
		}
		done <- s
	}()
	<-began
	for i := range int64(50) { // five times the ring's bound
		c.Apply(large(11+i, fmt.Sprint("p", i), 10_000))
	}
	close(going)
	if s := <-done; s.Len() != 51 || loads != 1 {
		t.Errorf("%d objects after %d loads", s.Len(), loads)
	}
	c.Apply(large(100, "after", 10))
	if s := c.Resources()[0]; s.EventBytes > 150_000 {
		t.Errorf("%d bytes are cached after the load", s.EventBytes)
	}
}

// An unreadable object fails only the lists that select it. A later event of the object makes it readable.
func TestAnUnreadableObjectAffectsNoOther(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	rows := sourceOf(10, &registryv1.Row{Namespace: "ns", Name: "fine", Json: []byte("{}")},
		&registryv1.Row{Namespace: "bad", Name: "x", Unreadable: "rubbish"})
	read := func() *Snapshot {
		s, err := c.Resource("pods").Snapshot(t.Context(), "", rows, waitFor(c))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := read()
	if _, _, bad := s.Unreadable("ns/"); bad || s.Len() != 1 {
		t.Error("a list of another namespace fails")
	}
	for _, prefix := range []string{"", "bad/"} {
		if key, why, bad := s.Unreadable(prefix); !bad || key != "bad/x" || why != "rubbish" {
			t.Errorf("%q: %v %q %q", prefix, bad, key, why)
		}
	}
	e := event(logv1.Type_TYPE_MODIFIED, 11, "x")
	e.Namespace = "bad"
	c.Apply(e)
	if _, _, bad := read().Unreadable(""); bad {
		t.Error("the object is still unreadable after an update")
	}
	if _, _, bad := s.Unreadable(""); !bad {
		t.Error("a snapshot changed")
	}
}

// Unreadable objects are read again later, because a KMS plugin may have recovered without an event. Readers use the
// former objects meanwhile.
func TestUnreadableObjectsAreReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(1<<20, 0)
		c.Apply(reset(10))
		var loads atomic.Int64
		var recovered atomic.Bool
		rows := func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
			loads.Add(1)
			time.Sleep(time.Second) // of synctest's clock, as the sleep between reads
			row := &registryv1.Row{Namespace: "ns", Name: "x", Json: []byte("{}")}
			other := &registryv1.Row{Namespace: "ns", Name: "y", Json: []byte("{}")}
			if !recovered.Load() {
				row.Json, row.Unreadable = nil, "the KMS plugin is unavailable"
				if loads.Load() > 1 {
					other.Json, other.Unreadable = nil, row.Unreadable
				}
			}
			add(row)
			add(other)
			return 10, nil
		}
		// readEverySecond returns whether the last read finds the object unreadable.
		readEverySecond := func(reads int) (unreadable bool) {
			for range reads {
				began := time.Now()
				s, err := c.Resource("pods").Snapshot(t.Context(), "", rows, waitFor(c))
				if took := time.Since(began); err != nil || loads.Load() > 1 && took > 0 {
					t.Fatalf("a read took %v: %v", took, err)
				}
				if _, ok := s.Get("ns/y"); !ok {
					t.Fatal("a readable object has become unreadable")
				}
				unreadable = s.IsUnreadable("ns/x")
				time.Sleep(time.Second)
			}
			return unreadable
		}
		for _, step := range []struct{ reads, loads int }{{5, 1}, {10, 2}, {15, 2}, {10, 3}, {3600, 17}} {
			if readEverySecond(step.reads); loads.Load() != int64(step.loads) {
				t.Errorf("%d loads, not %d", loads.Load(), step.loads)
			}
		}
		recovered.Store(true)
		if readEverySecond(310) {
			t.Error("the object is still unreadable")
		}
		before := loads.Load()
		if readEverySecond(600); loads.Load() != before {
			t.Error("readable objects are read again")
		}
	})
}

// A change of epoch overruns every cursor, even if the new epoch's revisions are smaller (F3).
func TestAnotherEpochOverrunsEveryCursor(t *testing.T) {
	c := New(1<<20, 0)
	first := reset(1000)
	first.Epoch = "a"
	c.Apply(first)
	r := subscribe(c, "pods")
	cur, _, ok := r.After(1000, lastIndex)
	if !ok || c.Epoch() != "a" {
		t.Fatal(c.Epoch())
	}
	second := reset(500)
	second.Epoch = "b"
	c.Apply(second)
	if _, _, _, _, ok := r.Next(cur, 1); ok || c.Epoch() != "b" || c.Progress() != 500 {
		t.Errorf("a cursor is valid in epoch %q at %d", c.Epoch(), c.Progress())
	}
	// A change of epoch is detected even if the log no longer has its reset.
	cur, _, _ = r.After(500, lastIndex)
	third := event(logv1.Type_TYPE_ADDED, 400, "x")
	third.Epoch = "c"
	c.Apply(third)
	if _, _, _, _, ok := r.Next(cur, 1); ok || c.Epoch() != "c" {
		t.Errorf("a cursor is valid in epoch %q", c.Epoch())
	}
}

// An event that cannot be applied resets its resource, and no other resource of its transaction. It is not applied
// again.
func TestABrokenEventIsNotAppliedAgain(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	pods, nodes := c.Resource("pods"), c.Resource("nodes")
	a, b := pods.Subscribe(Trigger{}), nodes.Subscribe(Trigger{})
	fromA, _, _ := a.After(10, 1<<31-1)
	fromB, _, _ := b.After(10, 1<<31-1)
	broken := &logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        11,
		StorageResource: "pods",
		More:            true,
	} // it has no object
	sound := event(logv1.Type_TYPE_ADDED, 11, "n")
	sound.StorageResource, sound.Index = "nodes", 1
	c.Apply(broken)
	c.Apply(sound)
	c.Apply(event(logv1.Type_TYPE_ADDED, 12, "a"))
	if _, _, _, _, ok := a.Next(fromA, 10); ok {
		t.Error("a cursor is not overrun by an event that cannot be applied")
	}
	if events, _, _, _, ok := b.Next(fromB, 10); !ok || len(events) != 1 {
		t.Errorf("the other resource has %d events: %v", len(events), ok)
	}
	if c.Progress() != 12 {
		t.Errorf("progress %d", c.Progress())
	}
}

// A panic while building a frame is an error for its callers. The next caller builds the frame again.
func TestAFrameThatPanicsIsAnError(t *testing.T) {
	e := &Event{Item: &Item{}}
	if _, err := e.Frame(t.Context(), "k", func(context.Context) ([]byte, error) { panic("boom") }); err == nil {
		t.Error("no error")
	}
	if b, err := e.Frame(
		t.Context(),
		"k",
		func(context.Context) ([]byte, error) { return []byte("x"), nil },
	); err != nil ||
		string(b) != "x" {
		t.Errorf("%s %v", b, err)
	}
}

// Readers, a writer, loads, drops and resets run concurrently, and no list is older than its revision.
func TestListsAreNeverOlderThanTheySay(t *testing.T) {
	c := New(10_000, time.Nanosecond)
	c.Apply(reset(10))
	stop := make(chan struct{})
	failed := make(chan error, 100)
	for n := range 4 {
		name := fmt.Sprint("r", n%2)
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				floor := c.Progress()
				s, err := c.Resource(name).Snapshot(t.Context(), "",
					func(context.Context, string, func(*registryv1.Row)) (int64, error) {
						return c.Progress(), nil
					}, waitFor(c))
				if err != nil {
					failed <- err
					return
				}
				if s.Revision < floor {
					failed <- fmt.Errorf("a list at %d after progress %d", s.Revision, floor)
				}
			}
		}()
	}
	for i := range int64(3000) {
		e := event(logv1.Type_TYPE_ADDED, 11+i, fmt.Sprint("p", i%20))
		e.StorageResource = fmt.Sprint("r", i%2)
		c.Apply(e)
		if i%500 == 0 {
			c.Sweep()
		}
	}
	close(stop)
	select {
	case err := <-failed:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	default:
	}
}
