package cache

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// sums returns a progress message with the sum of pods: of the keys and revisions in objects, minus base.
func sums(revision int64, base uint64, objects map[string]int64) *logv1.Event {
	sum := -base
	for name, r := range objects {
		sum += core.ObjectHash("ns/"+name, r)
	}
	return &logv1.Event{Revision: revision, Sums: &logv1.Sums{Term: 1, Changes: map[string]uint64{"pods": sum}}}
}

// A cache that misses a change, or applies another, differs from the publisher's next sums. Its resource is reset, and
// the next reader reads it from etcd. A second difference within a minute resets nothing.
func TestAMissedChangeIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const base = 77
		c := New(1<<20, 0)
		c.Apply(reset(10))
		read := func(revision int64, names ...string) {
			t.Helper()
			c.Apply(&logv1.Event{Revision: revision})
			if _, err := c.Resource("pods").Snapshot(t.Context(), "", source(revision, names...), waitFor(c)); err != nil {
				t.Fatal(err)
			}
		}
		read(10, "a", "b")
		c.Apply(sums(10, base, map[string]int64{"a": 10, "b": 10}))
		c.Apply(event(logv1.Type_TYPE_MODIFIED, 11, "a"))
		c.Apply(event(logv1.Type_TYPE_ADDED, 12, "c"))
		c.Apply(event(logv1.Type_TYPE_DELETED, 13, "b"))
		c.Apply(sums(13, base, map[string]int64{"a": 11, "c": 12}))
		if _, loaded := c.Resource("pods").Loaded(); !loaded || c.Resets() != 1 {
			t.Fatalf("the sums are equal, and there were %d resets", c.Resets())
		}
		c.Apply(event(logv1.Type_TYPE_MODIFIED, 15, "c")) // and not revision 14 of a
		c.Apply(sums(15, base, map[string]int64{"a": 14, "c": 15}))
		if _, loaded := c.Resource("pods").Loaded(); loaded || c.Resets() != 2 {
			t.Fatalf("the sums differ, and there were %d resets", c.Resets())
		}
		s := <-c.Differences()
		got := fmt.Sprint(names(s.Snapshot))
		if got != "[a c]" || s.Revision != 15 || s.Resource() != "pods" || !s.Reset {
			t.Errorf("the difference has %s of %s at %d", got, s.Resource(), s.Revision)
		}
		read(15, "a", "c")
		c.Apply(sums(15, base, nil))
		c.Apply(sums(16, base, map[string]int64{"a": 1}))
		if _, loaded := c.Resource("pods").Loaded(); !loaded || len(c.Differences()) != 1 {
			t.Errorf("another difference resets the resource, or is not reported")
		}
		if s := <-c.Differences(); s.Reset {
			t.Error("the difference states that the resource was reset")
		}
		time.Sleep(minDifferencePause)
		c.Apply(sums(17, base, nil))
		if _, loaded := c.Resource("pods").Loaded(); loaded {
			t.Error("after a minute, a difference does not reset the resource")
		}
	})
}

// The events of a cache differ from the publisher's next sums if the cache has missed or repeated an event, also
// without objects. A publisher of an earlier release has no sums of events.
func TestAMissedEventIsFound(t *testing.T) {
	for name, x := range map[string]struct {
		cache *Cache
		// applied are the revisions of the events that the cache applies, of 12 and 13.
		applied []int64
		old     bool
		found   bool
	}{
		"events only, nothing is missed":    {NewEvents(1 << 20), []int64{12, 13}, false, false},
		"events only, an event is missed":   {NewEvents(1 << 20), []int64{13}, false, true},
		"not loaded, nothing is missed":     {New(1<<20, 0), []int64{12, 13}, false, false},
		"not loaded, an event is missed":    {New(1<<20, 0), []int64{12}, false, true},
		"not loaded, an event is invented":  {New(1<<20, 0), []int64{11, 12, 13}, false, false}, // it is a duplicate
		"events only, the publisher is old": {NewEvents(1 << 20), []int64{13}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := x.cache
			sum := uint64(0)
			sums := func(revision int64) {
				m := &logv1.Sums{Term: 1, Changes: map[string]uint64{"pods": sum},
					Events: map[string]uint64{"pods": sum}}
				if x.old {
					m.Events = nil
				}
				c.Apply(&logv1.Event{Revision: revision, Sums: m})
			}
			c.Apply(reset(10))
			c.Apply(event(logv1.Type_TYPE_ADDED, 11, "a"))
			sums(11)
			watch := c.Resource("pods").Subscribe(Trigger{})
			defer watch.Close()
			for _, revision := range []int64{12, 13} {
				sum += core.ObjectHash("ns/a", revision)
			}
			for _, revision := range x.applied {
				c.Apply(event(logv1.Type_TYPE_MODIFIED, revision, "a"))
			}
			sums(13)
			if found := len(c.Differences()) > 0; found != x.found || watch.Differed(20) != x.found {
				t.Fatalf("a difference is found: %v; the watch expires: %v", found, watch.Differed(20))
			}
			if !x.found {
				return
			}
			if d := <-c.Differences(); !d.Reset || d.Objects || d.Revision != 13 || d.Resource() != "pods" {
				t.Errorf("the difference is %+v", d)
			}
			sums(13)
			c.Apply(event(logv1.Type_TYPE_MODIFIED, 14, "a"))
			sum += core.ObjectHash("ns/a", 14)
			if sums(14); len(c.Differences()) > 0 {
				t.Error("the events differ again after the reset")
			}
		})
	}
}

// A difference that returns resets its resource after 1, 2, 4 … 60 minutes, and after two hours at once again.
func TestADifferenceThatReturnsResetsLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(1<<20, 0)
		c.Apply(reset(10))
		var resets []time.Duration
		begin := time.Now()
		differ := func() {
			s, err := c.Resource("pods").Snapshot(t.Context(), "", source(10, "a"), waitFor(c))
			if err != nil {
				t.Fatal(err)
			}
			if s.ResetDiffering() {
				resets = append(resets, time.Since(begin).Round(time.Minute))
			}
		}
		for range 4 * 60 * 2 {
			differ()
			time.Sleep(30 * time.Second)
		}
		time.Sleep(2 * maxDifferencePause)
		for range 3 {
			differ()
			time.Sleep(minDifferencePause)
		}
		want := "[0s 1m0s 3m0s 7m0s 15m0s 31m0s 1h3m0s 2h3m0s 3h3m0s 6h0m0s 6h1m0s]"
		if got := fmt.Sprint(resets); got != want {
			t.Errorf("resets after %s, want %s", got, want)
		}
	})
}

// A second missed event resets the resource after the pause, also if the objects have been loaded again: its watches
// have missed the event. The objects do not differ.
func TestAMissedEventIsRememberedOverALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(1<<20, 0)
		sum := uint64(0)
		// published publishes an event and the sums after it. The cache misses the event, or not.
		published := func(revision int64, missed bool) {
			sum += core.ObjectHash("ns/a", revision)
			if !missed {
				c.Apply(event(logv1.Type_TYPE_MODIFIED, revision, "a"))
			}
			c.Apply(&logv1.Event{Revision: revision, Sums: &logv1.Sums{
				Term:    1,
				Changes: map[string]uint64{"pods": core.ObjectHash("ns/a", revision)},
				Events:  map[string]uint64{"pods": sum},
			}})
		}
		c.Apply(reset(10))
		published(11, false)
		published(12, true)
		if d := <-c.Differences(); !d.Reset {
			t.Fatal("the first difference does not reset the resource")
		}
		published(13, false)
		watch := c.Resource("pods").Subscribe(Trigger{})
		defer watch.Close()
		published(14, true)
		if d := <-c.Differences(); d.Reset {
			t.Fatal("the second difference resets the resource at once")
		}
		if _, err := c.Resource("pods").Snapshot(t.Context(), "", source(14, "a"), waitFor(c)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * minDifferencePause)
		published(15, false)
		select {
		case d := <-c.Differences():
			if !d.Reset || d.Objects || !watch.Differed(20) {
				t.Errorf("the difference is %+v, and the watch expires: %v", d, watch.Differed(20))
			}
		default:
			t.Error("the difference is forgotten")
		}
	})
}

// The first change of a term, and the first after a load, is compared if the cache has received the sums before it.
func TestAMissedFirstChangeIsFound(t *testing.T) {
	const term = 2
	a := func(revision int64) uint64 { return core.ObjectHash("ns/a", revision) }
	sums := func(revision int64, complete bool, resource string, change uint64) *logv1.Event {
		e := &logv1.Event{Revision: revision, Sums: &logv1.Sums{Term: term, Complete: complete}}
		if resource != "" {
			e.Sums.Changes = map[string]uint64{resource: change}
		}
		return e
	}
	changed := func(revision int64) *logv1.Event { return event(logv1.Type_TYPE_MODIFIED, revision, "a") }
	resetOfPods := reset(11)
	resetOfPods.StorageResource = "pods"
	begun, load := sums(10, true, "", 0), (*logv1.Event)(nil)
	for name, x := range map[string]struct {
		steps []*logv1.Event // nil: a load
		found bool
	}{
		"the first of the term": {
			[]*logv1.Event{load, begun, sums(11, false, "pods", a(11)-a(10))}, true},
		"the first after a load": {
			[]*logv1.Event{begun, load, sums(11, false, "pods", a(11)-a(10))}, true},
		"an invented change": {
			[]*logv1.Event{load, begun, changed(11), sums(11, true, "nodes", 1)}, true},
		"none is missed": {
			[]*logv1.Event{load, begun, changed(11), sums(11, false, "pods", a(11)-a(10))}, false},
		"a change before the load": {
			[]*logv1.Event{begun, changed(11), load, sums(11, false, "pods", a(11)-a(10))}, false},
		"a reset before the load": {
			[]*logv1.Event{begun, load, resetOfPods, load, sums(11, false, "pods", a(11)-a(10))}, false},
		"a gap before the load": {
			[]*logv1.Event{begun, reset(11), sums(12, false, "nodes", 1), load, changed(13),
				sums(13, false, "pods", a(13)-a(10))}, false},
		"a publisher without complete sums": {
			[]*logv1.Event{load, sums(10, false, "nodes", 1), changed(11), sums(11, false, "pods", a(11)-a(10)),
				changed(12), sums(12, false, "pods", a(12)-a(10))}, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := New(1<<20, 0)
			c.Apply(reset(10))
			for _, e := range x.steps {
				if e != load {
					c.Apply(e)
					continue
				}
				read := source(c.Progress(), "a")
				if _, err := c.Resource("pods").Snapshot(t.Context(), "", read, waitFor(c)); err != nil {
					t.Fatal(err)
				}
			}
			if found := len(c.Differences()) > 0; found != x.found {
				t.Errorf("a difference is found: %v", found)
			}
		})
	}
}

// Unreadable objects are part of the sum. Another term of the publisher begins a new comparison, and sums of an earlier
// position are ignored.
func TestASumIsOfEveryObject(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	withOdd := sourceOf(10, &registryv1.Row{Namespace: "ns", Name: "a", Revision: 3, Json: []byte("{}")},
		&registryv1.Row{Namespace: "ns", Name: "odd", Revision: 4, Unreadable: "rubbish"})
	if _, err := c.Resource("pods").Snapshot(t.Context(), "", withOdd, waitFor(c)); err != nil {
		t.Fatal(err)
	}
	c.Apply(sums(10, 0, map[string]int64{"a": 3, "odd": 4}))
	c.Apply(event(logv1.Type_TYPE_MODIFIED, 11, "odd"))
	c.Apply(sums(11, 0, map[string]int64{"a": 3, "odd": 11}))
	c.Apply(event(logv1.Type_TYPE_DELETED, 12, "odd"))
	c.Apply(sums(12, 0, map[string]int64{"a": 3}))
	other := sums(12, 5, map[string]int64{"a": 3})
	other.Sums.Term = 2
	c.Apply(other)
	old := sums(11, 9, nil) // the log lost its end, and the cache is ahead
	old.Sums.Term = 2
	c.Apply(old)
	if _, loaded := c.Resource("pods").Loaded(); !loaded {
		t.Error("the resource was reset")
	}
	bad := sums(12, 5, map[string]int64{"a": 4})
	bad.Sums.Term = 2
	c.Apply(bad)
	if _, loaded := c.Resource("pods").Loaded(); loaded {
		t.Error("another revision of an object is no difference")
	}
}

func BenchmarkObjectHash(b *testing.B) {
	for b.Loop() {
		core.ObjectHash("some-namespace/some-deployment-7d9f8c7b5-x2x4z", 123456789)
	}
}
