package cache

import (
	"context"
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
// the next reader reads it from etcd. A second difference within an hour resets nothing.
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
		time.Sleep(differenceResetPeriod)
		c.Apply(sums(17, base, nil))
		if _, loaded := c.Resource("pods").Loaded(); loaded {
			t.Error("after an hour, a difference does not reset the resource")
		}
	})
}

// Unreadable objects are part of the sum. Another term of the publisher begins a new comparison, and sums of an earlier
// position are ignored.
func TestASumIsOfEveryObject(t *testing.T) {
	c := New(1<<20, 0)
	c.Apply(reset(10))
	withOdd := func(context.Context, string) ([]*registryv1.Row, int64, error) {
		return []*registryv1.Row{{Namespace: "ns", Name: "a", Revision: 3, Json: []byte("{}")},
			{Namespace: "ns", Name: "odd", Revision: 4, Unreadable: "rubbish"}}, 10, nil
	}
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
