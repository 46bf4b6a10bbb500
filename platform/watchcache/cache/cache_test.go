package cache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func event(kind logv1.Type, revision int64, name string) *logv1.Event {
	return &logv1.Event{
		Type:            kind,
		Revision:        revision,
		StorageResource: "pods",
		Namespace:       "ns",
		Name:            name,
		Object:          &logv1.Object{Json: []byte(fmt.Sprintf(`{"metadata":{"name":%q}}`, name))},
	}
}

func reset(revision int64) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}
}

func source(revision int64, names ...string) Source {
	var rows []*registryv1.Row
	for _, n := range names {
		rows = append(rows, &registryv1.Row{Namespace: "ns", Name: n, Revision: revision, Json: []byte("{}")})
	}
	return sourceOf(revision, rows...)
}

// sourceOf returns a Source of rows at a revision.
func sourceOf(revision int64, rows ...*registryv1.Row) Source {
	return func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
		for _, row := range rows {
			add(row)
		}
		return revision, nil
	}
}

func waitFor(c *Cache) func(context.Context, int64) error {
	return func(ctx context.Context, r int64) error {
		return c.Wait(ctx, r, func(ctx context.Context, advanced <-chan struct{}) {
			select {
			case <-advanced:
			case <-ctx.Done():
			}
		})
	}
}

func subscribe(c *Cache, resource string) *Subscription {
	return c.Resource(resource).Subscribe(Trigger{})
}

func names(s *Snapshot) (out []string) {
	s.scan("", "", func(i *Item) bool { out = append(out, i.Name); return true })
	return out
}

func TestASnapshotIncludesLaterEvents(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	c.Apply(event(logv1.Type_TYPE_ADDED, 11, "early"))
	c.Apply(event(logv1.Type_TYPE_ADDED, 13, "late"))
	c.Apply(event(logv1.Type_TYPE_DELETED, 14, "a"))
	s, err := c.Resource("pods").Snapshot(t.Context(), "", source(12, "a", "early"), waitFor(c))
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

// A snapshot newer than the log is not returned until the log has reached its revision. Otherwise the list's
// resourceVersion would be lower than its objects'.
func TestASnapshotWaitsForTheLog(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	done := make(chan *Snapshot)
	go func() {
		s, err := c.Resource("pods").Snapshot(t.Context(), "", source(20, "a"), waitFor(c))
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
	c := New(1<<20, 0)
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
	cur, _, ok := subscribe(c, "pods").After(10, lastIndex)
	events, _, progress, _, _ := subscribe(c, "pods").Next(cur, 10)
	if !ok || len(events) != 2 || progress != 11 {
		t.Errorf("%d events, progress %d", len(events), progress)
	}
	if cur, _, _ := subscribe(c, "pods").After(11, 0); true {
		if events, _, _, _, _ := subscribe(c, "pods").Next(cur, 10); len(events) != 1 || events[0].Item.Name != "b" {
			t.Errorf("resumed within the transaction: %v", events)
		}
	}
}

// A reset overruns every cursor, even a cursor after all events before the reset.
func TestAResetEndsEveryCursor(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	c.Apply(event(logv1.Type_TYPE_ADDED, 11, "a"))
	r := subscribe(c, "pods")
	seen, _, _ := r.After(11, lastIndex)
	quiet, _, _ := subscribe(c, "nodes").After(11, lastIndex)
	triggered := c.Resource("pods").Subscribe(Trigger{ByNamespace, "ns"})
	later, _, _ := triggered.After(11, lastIndex)
	c.Apply(reset(50))
	for name, x := range map[string]struct {
		r   *Subscription
		cur Cursor
	}{"pods": {r, seen}, "nodes": {subscribe(c, "nodes"), quiet}, "a namespace": {triggered, later}} {
		if _, _, _, _, ok := x.r.Next(x.cur, 10); ok {
			t.Errorf("a watch of %s goes on over a gap", name)
		}
	}
	if _, low, ok := r.After(49, 0); ok || low != 50 {
		t.Errorf("resumed from before the reset (low %d)", low)
	}
}

// A log that begins again in the same epoch, before the cache's revision, leaves no gap. Its events are duplicates, and
// an open transaction is repeated.
func TestALogThatBeginsAgainOverrunsNoCursor(t *testing.T) {
	c := New(1<<20, 0)
	withEpoch := func(e *logv1.Event, more bool) *logv1.Event { e.Epoch, e.More = "h", more; return e }
	c.Apply(withEpoch(reset(10), false))
	c.Apply(withEpoch(event(logv1.Type_TYPE_ADDED, 11, "a"), false))
	r := subscribe(c, "pods")
	cur, _, _ := r.After(11, lastIndex)
	c.Apply(withEpoch(event(logv1.Type_TYPE_ADDED, 12, "b"), true))
	c.Apply(withEpoch(reset(9), false))
	c.Apply(withEpoch(event(logv1.Type_TYPE_ADDED, 11, "a"), false))
	c.Apply(withEpoch(event(logv1.Type_TYPE_ADDED, 12, "b"), true))
	last := withEpoch(event(logv1.Type_TYPE_ADDED, 12, "c"), false)
	last.Index = 1
	c.Apply(last)
	batch, _, _, _, ok := r.Next(cur, 10)
	if !ok || len(batch) != 2 || c.Progress() != 12 || c.Resets() != 1 {
		t.Errorf("%d events, %v, at %d, %d resets", len(batch), ok, c.Progress(), c.Resets())
	}
}

const lastIndex = 1<<31 - 1

func TestARingForgetsWholeRevisions(t *testing.T) {
	c := New(600, 0)
	c.Apply(reset(10))
	for i := range int64(20) {
		c.Apply(event(logv1.Type_TYPE_ADDED, 11+i, fmt.Sprint("p", i)))
	}
	r := subscribe(c, "pods")
	if _, _, ok := r.After(11, lastIndex); ok {
		t.Error("what was forgotten can be resumed from")
	}
	cur, _, ok := r.After(29, lastIndex)
	events, _, _, _, _ := r.Next(cur, 10)
	if !ok || len(events) != 1 || events[0].Revision != 30 {
		t.Errorf("%v %v", ok, events)
	}
}

// The ring of a resource without watches shrinks, and grows again when watches come. It then has every event after its
// horizon, and no watch resumes from before (kubernetes #91415).
func TestAResizedRingHoldsEveryEventAfterItsHorizon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(20_000, time.Minute)
		c.Apply(reset(10))
		last := int64(10)
		add := func(n int) {
			for range n {
				last++
				c.Apply(event(logv1.Type_TYPE_ADDED, last, fmt.Sprint("p", last)))
			}
		}
		check := func(state string, atLeast int) {
			t.Helper()
			r := subscribe(c, "pods")
			defer r.Close()
			resumable := 0
			for after := int64(10); after <= last; after++ {
				cur, _, ok := r.After(after, lastIndex)
				if !ok {
					continue
				}
				resumable++
				events, _, _, _, _ := r.Next(cur, 1000)
				if got := int64(len(events)); got != last-after {
					t.Fatalf("%s: a watch from %d receives %d events of %d", state, after, got, last-after)
				}
			}
			if resumable < atLeast {
				t.Errorf("%s: watches can resume from %d revisions", state, resumable)
			}
		}
		add(30)
		check("large", 30)
		time.Sleep(2 * time.Minute)
		add(1)
		check("small", 1)
		add(30)
		check("large again", 30)
	})
}

// A replica that has read no event yet, or only progress, serves no watch from before its position (kubernetes #49956).
// The event at its position may have come between the client's list and its watch.
func TestAnEmptyRingHoldsNothingBeforeItsPosition(t *testing.T) {
	for name, first := range map[string]*logv1.Event{
		"a reset":  reset(11),
		"progress": {Revision: 11},
		"an event": event(logv1.Type_TYPE_ADDED, 12, "a"),
	} {
		c := New(1<<20, 0)
		c.Apply(first)
		r := subscribe(c, "pods")
		if _, _, ok := r.After(10, lastIndex); ok {
			t.Errorf("%s: a watch from 10 misses event 11", name)
		}
		if _, _, ok := r.After(11, lastIndex); !ok {
			t.Errorf("%s: a watch from 11 expires", name)
		}
	}
}

// A reader of the objects holds no lock that events need (kubernetes #138728, #139526).
func TestAReaderDelaysNoEvent(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	s, err := c.Resource("pods").Snapshot(t.Context(), "", source(10, "a", "b"), waitFor(c))
	if err != nil {
		t.Fatal(err)
	}
	err = s.Select(t.Context(), Trigger{}, "", "", func(*Item) bool {
		applied := make(chan struct{})
		go func() { defer close(applied); c.Apply(event(logv1.Type_TYPE_MODIFIED, c.Progress()+1, "a")) }()
		select {
		case <-applied:
			return true
		case <-time.After(2 * time.Minute):
			t.Error("an event waits for a reader")
			return false
		}
	})
	if err != nil || c.Progress() != 12 {
		t.Errorf("progress %d, %v", c.Progress(), err)
	}
}

// Slow readers iterate over events that the ring drops meanwhile.
func TestReadersAndWritersDoNotDisturbEachOther(t *testing.T) {
	c := New(2000, 0)
	c.Apply(reset(0))
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 4 {
		wg.Go(func() {
			last := int64(0)
			for ctx.Err() == nil {
				cur, low, ok := subscribe(c, "pods").After(last, lastIndex)
				if !ok {
					last = low
					continue
				}
				events, _, _, _, _ := subscribe(c, "pods").Next(cur, 100)
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

func TestAFrameIsMadeOnceAndAnErrorIsNotCached(t *testing.T) {
	e := &Event{Item: &Item{}, resource: New(1<<20, 0).Resource("pods")}
	n := 0
	fail := func(context.Context) ([]byte, error) { n++; return nil, errors.New("no") }
	if _, err := e.Frame(t.Context(), "k", fail); err == nil {
		t.Error("no error")
	}
	build := func(context.Context) ([]byte, error) { n++; return []byte("x"), nil }
	for range 3 {
		if b, err := e.Frame(t.Context(), "k", build); err != nil || string(b) != "x" {
			t.Errorf("%s %v", b, err)
		}
	}
	if n != 2 {
		t.Errorf("made %d times", n)
	}
	// an event in no ring is not accounted for, so its frames are not cached
	again := &Event{Item: &Item{}}
	for range 2 {
		_, _ = again.Frame(t.Context(), "k", build)
	}
	if n != 4 || len(again.frames.entries) != 0 {
		t.Errorf("%d frames of an event in no ring are cached", len(again.frames.entries))
	}
}

// Building a frame continues while any caller waits. Its context ends when the last caller leaves, and the next caller
// builds the frame again.
func TestMakingAFrameEndsWithItsLastCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &Event{Item: &Item{}, resource: New(1<<20, 0).Resource("pods")}
		var cancels [2]context.CancelFunc
		errs := make(chan error, 2)
		var made atomic.Pointer[context.Context]
		for i := range cancels {
			ctx, cancel := context.WithCancel(t.Context())
			cancels[i] = cancel
			go func() {
				_, err := e.Frame(ctx, "k", func(ctx context.Context) ([]byte, error) {
					made.Store(&ctx)
					<-ctx.Done()
					return nil, ctx.Err()
				})
				errs <- err
			}()
			synctest.Wait()
		}
		cancels[0]()
		synctest.Wait()
		if err := (*made.Load()).Err(); err != nil {
			t.Errorf("a caller still waits: %v", err)
		}
		cancels[1]()
		for range cancels {
			if err := <-errs; !errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
		}
		if b, err := e.Frame(t.Context(), "k", func(ctx context.Context) ([]byte, error) {
			return []byte("x"), ctx.Err()
		}); err != nil || string(b) != "x" {
			t.Errorf("%s %v", b, err)
		}
	})
}

// Only the events of its trigger wake a subscription. An event by which an object leaves the trigger is among them.
func TestATriggerHasItsOwnEvents(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	on := func(revision int64, name, node, before string) *logv1.Event {
		e := event(logv1.Type_TYPE_MODIFIED, revision, name)
		e.Object.Fields = map[string]string{"spec.nodeName": node}
		if before != node {
			e.Previous = &logv1.Object{Fields: map[string]string{"spec.nodeName": before}}
		}
		return e
	}
	c.Apply(on(11, "early", "n1", "n1"))
	f := c.Resource("pods").Subscribe(Trigger{"spec.nodeName", "n1"})
	name := c.Resource("pods").Subscribe(Trigger{ByKey, "ns/b"})
	cur, _, ok := f.After(10, lastIndex)
	if !ok {
		t.Fatal("not there")
	}
	_, _, _, changed, _ := f.Next(cur, 10)
	c.Apply(on(12, "b", "n2", "n2"))
	select {
	case <-changed:
		t.Error("woken by another node's pod")
	default:
	}
	c.Apply(on(13, "c", "n1", ""))
	c.Apply(on(14, "c", "n2", "n1"))
	<-changed
	events, _, progress, _, _ := f.Next(cur, 10)
	if got := fmt.Sprint(revisions(events)); got != "[11 13 14]" || progress != 14 {
		t.Errorf("%s, progress %d", got, progress)
	}
	events, _, _, _, _ = name.Next(0, 10)
	if got := fmt.Sprint(revisions(events)); got != "[12]" {
		t.Errorf("by name: %s", got)
	}
	f.Close()
	name.Close()
	if s := c.Resources()[0]; s.Triggers != 0 || s.Watches != 0 {
		t.Errorf("left behind: %+v", s)
	}
}

// An event that the ring drops leaves its triggers too, also the triggers of the object's state before. Otherwise a
// trigger without further events would hold it.
func TestADroppedEventLeavesItsTriggers(t *testing.T) {
	c := New(1, 0) // the ring holds the newest event
	c.Apply(reset(10))
	moved := event(logv1.Type_TYPE_MODIFIED, 11, "a")
	moved.Object.Fields = map[string]string{"spec.nodeName": "n2"}
	moved.Previous = &logv1.Object{Fields: map[string]string{"spec.nodeName": "n1"}}
	triggers := []Trigger{{"spec.nodeName", "n1"}, {"spec.nodeName", "n2"}, {ByKey, "ns/a"}}
	var subs []*Subscription
	for _, of := range triggers {
		s := c.Resource("pods").Subscribe(of)
		defer s.Close()
		subs = append(subs, s)
	}
	c.Apply(moved)
	for i, s := range subs {
		if n := s.ring.Len(); n != 1 {
			t.Errorf("%v holds %d events, not the new event", triggers[i], n)
		}
	}
	c.Apply(event(logv1.Type_TYPE_MODIFIED, 12, "b"))
	for i, s := range subs {
		if n := s.ring.Len(); n != 0 {
			t.Errorf("%v holds %d dropped events", triggers[i], n)
		}
	}
}

func revisions(events []*Event) (out []int64) {
	for _, e := range events {
		out = append(out, e.Revision)
	}
	return out
}

func TestAnIndexFollowsTheObjects(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	rows := func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
		for i := range 10 {
			add(&registryv1.Row{
				Namespace: fmt.Sprint("ns", i%2),
				Name:      fmt.Sprint("p", i),
				Revision:  10,
				Fields:    map[string]string{"spec.nodeName": fmt.Sprint("n", i%3)},
			})
		}
		return 10, nil
	}
	list := func(prefix string) string {
		s, err := c.Resource("pods").Snapshot(t.Context(), "spec.nodeName", rows, waitFor(c))
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		s.scanField(Trigger{"spec.nodeName", "n1"}, prefix, "", func(i *Item) bool {
			keys = append(keys, i.Key)
			return true
		})
		return fmt.Sprint(keys)
	}
	if got := list(""); got != "[ns0/p4 ns1/p1 ns1/p7]" {
		t.Error(got)
	}
	move := event(logv1.Type_TYPE_MODIFIED, 11, "p1")
	move.Namespace, move.Object.Fields = "ns1", map[string]string{"spec.nodeName": "n2"}
	gone := event(logv1.Type_TYPE_DELETED, 12, "p7")
	gone.Namespace, gone.Object.Fields = "ns1", map[string]string{"spec.nodeName": "n1"}
	come := event(logv1.Type_TYPE_ADDED, 13, "p99")
	come.Namespace, come.Object.Fields = "ns1", map[string]string{"spec.nodeName": "n1"}
	for _, e := range []*logv1.Event{move, gone, come} {
		c.Apply(e)
	}
	if got := list("ns1/"); got != "[ns1/p99]" {
		t.Error(got)
	}
}

// Lists by other fields cannot take the index by which kubelets list.
func TestTheNodesFieldIsAlwaysIndexed(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	r := c.Resource("pods")
	for _, field := range []string{"a", "b", "c", "d", "e", nodeField} {
		if _, err := r.Snapshot(t.Context(), field, source(10, "x"), waitFor(c)); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.indexes) != maxIndexes+1 || r.indexes[nodeField] == nil || r.indexes["e"] != nil {
		t.Errorf("the indexed fields are %v", slices.Sorted(maps.Keys(r.indexes)))
	}
}

// The index of a snapshot does not change with the objects (kubernetes #139610).
func TestASnapshotsIndexDoesNotChange(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	on := func(node string) map[string]string { return map[string]string{"spec.nodeName": node} }
	rows := func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
		for i := range 300 {
			add(&registryv1.Row{Name: fmt.Sprintf("p%03d", i), Revision: 10, Fields: on("n1")})
		}
		return 10, nil
	}
	s, err := c.Resource("pods").Snapshot(t.Context(), "spec.nodeName", rows, waitFor(c))
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	s.scanField(Trigger{"spec.nodeName", "n1"}, "", "", func(i *Item) bool {
		move := event(logv1.Type_TYPE_MODIFIED, int64(11+seen), fmt.Sprintf("p%03d", 299-seen))
		move.Namespace, move.Object.Fields = "", on("n2")
		c.Apply(move)
		seen++
		return i.Revision == 10
	})
	if seen != 300 {
		t.Errorf("%d objects are on the node", seen)
	}
}

func TestAnIdleResourceIsDroppedAndReloaded(t *testing.T) {
	c := New(1<<20, time.Nanosecond)
	c.Apply(reset(10))
	read := func() *Snapshot {
		s, err := c.Resource("pods").Snapshot(t.Context(), "", source(10, "a"), waitFor(c))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	read()
	time.Sleep(time.Millisecond) // the clock must advance
	if got := fmt.Sprint(c.Sweep()); got != "[pods]" {
		t.Errorf("dropped %s", got)
	}
	if read().Len() != 1 {
		t.Error("it did not come back")
	}
}

// A reset of one resource leaves the other resources loaded.
func TestAResetOfOneResourceLeavesTheOthers(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	pods, nodes := subscribe(c, "pods"), subscribe(c, "nodes")
	p, _, _ := pods.After(10, lastIndex)
	n, _, _ := nodes.After(10, lastIndex)
	c.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, StorageResource: "pods", Revision: 12})
	if _, _, _, _, ok := pods.Next(p, 1); ok {
		t.Error("pods go on")
	}
	if _, _, _, _, ok := nodes.Next(n, 1); !ok {
		t.Error("nodes do not go on")
	}
	if p := c.Progress(); p != 12 {
		t.Errorf("progress %d", p)
	}
}

// Select ends soon after its context.
func TestSelectingEndsWithItsContext(t *testing.T) {
	c := New(1<<20, 0)
	r := c.Resource("pods")
	var rows []*registryv1.Row
	for i := range 10 * contextCheckInterval {
		rows = append(rows, &registryv1.Row{Namespace: "ns", Name: fmt.Sprintf("p-%05d", i), Json: []byte("{}")})
	}
	s, err := r.Snapshot(t.Context(), "", sourceOf(1, rows...), func(context.Context, int64) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	visited := 0
	err = s.Select(ctx, Trigger{}, "", "", func(*Item) bool {
		if visited++; visited == 1 {
			cancel()
		}
		return true
	})
	if !errors.Is(err, context.Canceled) || visited > contextCheckInterval {
		t.Errorf("%d objects visited, %v", visited, err)
	}
}
