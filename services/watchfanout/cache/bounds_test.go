package cache

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func large(revision int64, name string, n int) *logv1.Event {
	e := event(logv1.Type_TYPE_MODIFIED, revision, name)
	e.Object.Json = []byte(`{"x":"` + strings.Repeat("x", n) + `"}`)
	return e
}

// A ring holds no more than its bound, with the states before and with what was made of its events (F9).
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
	c.Sweep() // frames of the newest came after its applying
	s := c.Resources()[0]
	if held := s.EventBytes; held > bound+200_000 || s.Events > 12 {
		t.Errorf("%d events hold %d bytes of %d", s.Events, held, bound)
	}
	held := 0
	for _, e := range r.events.All() {
		held += e.Size() + e.frames.bytes
	}
	if int64(held) != r.ringBytes.Load() {
		t.Errorf("%d bytes are held, %d are told", held, r.ringBytes.Load())
	}
}

// However much happens while a resource is being loaded, the load comes to an end (F6).
func TestALoadIsNotStarvedByItsRing(t *testing.T) {
	c := New(100_000, 0)
	c.Apply(reset(10))
	began, going := make(chan struct{}), make(chan struct{})
	loads := 0
	slow := func(context.Context, string) ([]*registryv1.Row, int64, error) {
		if loads++; loads == 1 {
			close(began)
		}
		<-going
		return []*registryv1.Row{{Namespace: "ns", Name: "old", Json: []byte("{}")}}, 10, nil
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
	for i := range int64(50) { // five times what the ring holds
		c.Apply(large(11+i, fmt.Sprint("p", i), 10_000))
	}
	close(going)
	if s := <-done; s.Len() != 51 || loads != 1 {
		t.Errorf("%d objects after %d loads", s.Len(), loads)
	}
	c.Apply(large(100, "after", 10))
	if s := c.Resources()[0]; s.EventBytes > 150_000 {
		t.Errorf("%d bytes are kept after the load", s.EventBytes)
	}
}

// What cannot be read is said of those that ask for it, and of nobody else; it is forgotten when it is written anew.
func TestAnUnreadableObjectAffectsNoOther(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	rows := func(context.Context, string) ([]*registryv1.Row, int64, error) {
		return []*registryv1.Row{{
			Namespace: "ns",
			Name:      "fine",
			Json:      []byte("{}"),
		}, {Namespace: "bad", Name: "x", Unreadable: "rubbish"}}, 10, nil
	}
	read := func() *Snapshot {
		s, err := c.Resource("pods").Snapshot(t.Context(), "", rows, waitFor(c))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := read()
	if _, _, bad := s.Unreadable("ns/"); bad || s.Len() != 1 {
		t.Error("another namespace hears of it")
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
		t.Error("it is still unreadable though it was written anew")
	}
	if _, _, bad := s.Unreadable(""); !bad {
		t.Error("a snapshot changed")
	}
}

// Cursors of another history of etcd are overrun, also where its revisions are smaller (F3).
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
		t.Errorf("a cursor goes on in history %q at %d", c.Epoch(), c.Progress())
	}
	// Also where the reset itself has been forgotten by the log.
	cur, _, _ = r.After(500, lastIndex)
	third := event(logv1.Type_TYPE_ADDED, 400, "x")
	third.Epoch = "c"
	c.Apply(third)
	if _, _, _, _, ok := r.Next(cur, 1); ok || c.Epoch() != "c" {
		t.Errorf("a cursor goes on in history %q", c.Epoch())
	}
}

// An event that cannot be applied is forgotten with its resource, and with no other of its transaction; it is not met
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
	} // without an object
	sound := event(logv1.Type_TYPE_ADDED, 11, "n")
	sound.StorageResource, sound.Index = "nodes", 1
	c.Apply(broken)
	c.Apply(sound)
	c.Apply(event(logv1.Type_TYPE_ADDED, 12, "a"))
	if _, _, _, _, ok := a.Next(fromA, 10); ok {
		t.Error("what could not be applied is left out in silence")
	}
	if events, _, _, _, ok := b.Next(fromB, 10); !ok || len(events) != 1 {
		t.Errorf("the other resource has %d events: %v", len(events), ok)
	}
	if c.Progress() != 12 {
		t.Errorf("progress %d", c.Progress())
	}
}

// A frame that panics is an error for those who want it, and can be made again.
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

// Many readers, a writer, loads, drops and resets do not disturb each other, and no list is older than it says.
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
					func(context.Context, string) ([]*registryv1.Row, int64, error) {
						return nil, c.Progress(), nil
					}, waitFor(c))
				if err != nil {
					failed <- err
					return
				}
				if s.Revision < floor {
					failed <- fmt.Errorf("a list at %d, though %d had been reached", s.Revision, floor)
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
