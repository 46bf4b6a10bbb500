package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func event(kind logv1.Type, revision int64, name string) *logv1.Event {
	return &logv1.Event{Type: kind, Revision: revision, StoredAs: "pods", Namespace: "ns", Name: name, Object: &logv1.Object{Json: []byte(fmt.Sprintf(`{"metadata":{"name":%q}}`, name))}}
}

func reset(revision int64) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}
}

func source(revision int64, names ...string) func(context.Context, string) ([]*registryv1.Row, int64, error) {
	return func(context.Context, string) ([]*registryv1.Row, int64, error) {
		var rows []*registryv1.Row
		for _, n := range names {
			rows = append(rows, &registryv1.Row{Namespace: "ns", Name: n, Revision: revision, Json: []byte("{}")})
		}
		return rows, revision, nil
	}
}

func at(c *Cache) func(context.Context, int64) error {
	return func(ctx context.Context, r int64) error {
		return c.Wait(ctx, r, func(ctx context.Context, advanced <-chan struct{}) {
			select {
			case <-advanced:
			case <-ctx.Done():
			}
		})
	}
}

func names(s *Snapshot) (out []string) {
	s.Scan("", "", func(i *Item) bool { out = append(out, i.Name); return true })
	return out
}

func TestASnapshotIsWhatWasReadAndWhatCameAfter(t *testing.T) {
	c := New(1 << 20)
	c.Apply(reset(10))
	c.Apply(event(logv1.Type_TYPE_ADDED, 11, "early"))
	c.Apply(event(logv1.Type_TYPE_ADDED, 13, "late"))
	c.Apply(event(logv1.Type_TYPE_DELETED, 14, "a"))
	s, err := c.Resource("pods").Snapshot(t.Context(), source(12, "a", "early"), at(c))
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(names(s)); got != "[early late]" || s.Revision != 14 {
		t.Errorf("%s at %d", got, s.Revision)
	}
	c.Apply(event(logv1.Type_TYPE_ADDED, 15, "z"))
	if got := fmt.Sprint(names(s)); got != "[early late]" {
		t.Errorf("a snapshot changed: %s", got)
	}
}

// A snapshot that is newer than the log's reading is not shown before the log has come as far: a list's
// resourceVersion would be too low for what it holds.
func TestASnapshotWaitsForTheLog(t *testing.T) {
	c := New(1 << 20)
	c.Apply(reset(10))
	done := make(chan *Snapshot)
	go func() {
		s, err := c.Resource("pods").Snapshot(t.Context(), source(20, "a"), at(c))
		if err != nil {
			t.Error(err)
		}
		done <- s
	}()
	select {
	case s := <-done:
		t.Fatalf("shown at %d", s.Revision)
	default:
	}
	c.Apply(&logv1.Event{Revision: 21})
	if s := <-done; s.Revision != 21 || s.Len() != 1 {
		t.Errorf("%d objects at %d", s.Len(), s.Revision)
	}
}

func TestATransactionIsAppliedAtOnce(t *testing.T) {
	c := New(1 << 20)
	c.Apply(reset(10))
	first := event(logv1.Type_TYPE_ADDED, 11, "a")
	first.More = true
	c.Apply(first)
	if p := c.Progress(); p != 10 {
		t.Errorf("half of revision 11 is shown as %d", p)
	}
	second := event(logv1.Type_TYPE_ADDED, 11, "b")
	second.Index = 1
	c.Apply(second)
	cur, _, ok := c.Resource("pods").After(10, 0)
	events, _, progress, _, _ := c.Resource("pods").Next(cur, 10)
	if !ok || len(events) != 2 || progress != 11 {
		t.Errorf("%d events, progress %d", len(events), progress)
	}
	if cur, _, _ := c.Resource("pods").After(11, 0); true {
		if events, _, _, _, _ := c.Resource("pods").Next(cur, 10); len(events) != 1 || events[0].Item.Name != "b" {
			t.Errorf("resumed within the transaction: %v", events)
		}
	}
}

// Whoever has seen everything before a reset has a gap all the same.
func TestAResetEndsEveryCursor(t *testing.T) {
	c := New(1 << 20)
	c.Apply(reset(10))
	c.Apply(event(logv1.Type_TYPE_ADDED, 11, "a"))
	r := c.Resource("pods")
	seen, _, _ := r.After(11, lastOf)
	quiet, _, _ := c.Resource("nodes").After(11, lastOf)
	c.Apply(reset(50))
	for name, x := range map[string]struct {
		r   *Resource
		cur Cursor
	}{"pods": {r, seen}, "nodes": {c.Resource("nodes"), quiet}} {
		if _, _, _, _, ok := x.r.Next(x.cur, 10); ok {
			t.Errorf("a watch of %s goes on over a gap", name)
		}
	}
	if _, low, ok := r.After(49, 0); ok || low != 50 {
		t.Errorf("resumed from before the reset (low %d)", low)
	}
}

const lastOf = 1<<31 - 1

func TestARingForgetsWholeRevisions(t *testing.T) {
	c := New(600)
	c.Apply(reset(10))
	for i := range int64(20) {
		c.Apply(event(logv1.Type_TYPE_ADDED, 11+i, fmt.Sprint("p", i)))
	}
	r := c.Resource("pods")
	if _, _, ok := r.After(11, lastOf); ok {
		t.Error("what was forgotten can be resumed from")
	}
	cur, _, ok := r.After(29, lastOf)
	events, _, _, _, _ := r.Next(cur, 10)
	if !ok || len(events) != 1 || events[0].Revision != 30 {
		t.Errorf("%v %v", ok, events)
	}
}

// Slow readers iterate over what the ring forgets meanwhile.
func TestReadersAndWritersDoNotDisturbEachOther(t *testing.T) {
	c := New(2000)
	c.Apply(reset(0))
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 4 {
		wg.Go(func() {
			last := int64(0)
			for ctx.Err() == nil {
				cur, low, ok := c.Resource("pods").After(last, lastOf)
				if !ok {
					last = low
					continue
				}
				events, _, _, _, _ := c.Resource("pods").Next(cur, 100)
				for _, e := range events {
					if e.Item == nil || e.Revision <= last {
						t.Errorf("after %d came %v", last, e)
						return
					}
					last = e.Revision
				}
			}
		})
	}
	for i := range int64(5000) {
		c.Apply(event(logv1.Type_TYPE_ADDED, i+1, fmt.Sprint("p", i%50)))
	}
	cancel()
	wg.Wait()
}

func TestAFrameIsMadeOnceAndAnErrorIsNotKept(t *testing.T) {
	e := &Event{}
	n := 0
	fail := func() ([]byte, error) { n++; return nil, errors.New("no") }
	if _, err := e.Frame("k", fail); err == nil {
		t.Error("no error")
	}
	make := func() ([]byte, error) { n++; return []byte("x"), nil }
	for range 3 {
		if b, err := e.Frame("k", make); err != nil || string(b) != "x" {
			t.Errorf("%s %v", b, err)
		}
	}
	if n != 2 {
		t.Errorf("made %d times", n)
	}
}
