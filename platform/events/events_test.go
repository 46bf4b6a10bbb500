package events

import (
	"fmt"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Classify depends on whether the selector matches the object now and matched it before.
func TestClassify(t *testing.T) {
	for _, c := range []struct {
		t           logv1.Type
		now, before bool
		event       string
		left        bool
	}{
		{logv1.Type_TYPE_ADDED, true, false, Added, false},
		{logv1.Type_TYPE_ADDED, false, false, Unselected, false},
		{logv1.Type_TYPE_MODIFIED, true, true, Modified, false},
		{logv1.Type_TYPE_MODIFIED, true, false, Added, false},
		{logv1.Type_TYPE_MODIFIED, false, true, Deleted, true},
		{logv1.Type_TYPE_MODIFIED, false, false, Unselected, false},
		{logv1.Type_TYPE_DELETED, true, true, Deleted, false},
		{logv1.Type_TYPE_DELETED, true, false, Deleted, false},
		{logv1.Type_TYPE_DELETED, false, true, Deleted, false},
		{logv1.Type_TYPE_DELETED, false, false, Unselected, false},
		{logv1.Type_TYPE_RESET, true, true, Unselected, false},
		{logv1.Type_TYPE_UNSPECIFIED, true, true, Unselected, false},
	} {
		if event, left := Classify(c.t, c.now, c.before); event != c.event || left != c.left {
			t.Errorf("%v, now %v, before %v: %q, left %v", c.t, c.now, c.before, event, left)
		}
	}
}

// Positions are ordered within one epoch of etcd, and differ in epoch only if both epochs are known.
func TestPositions(t *testing.T) {
	at := func(revision int64, index int32, history string) Position { return Position{revision, index, history} }
	for _, c := range []struct {
		p, q            Position
		before, foreign bool
	}{
		{at(1, 0, ""), at(1, 1, ""), true, false},
		{at(1, LastIndex, ""), at(2, 0, ""), true, false},
		{at(2, 0, ""), at(1, LastIndex, ""), false, false},
		{at(1, 0, "a"), at(1, 0, "a"), false, false},
		{at(1, 0, "a"), at(2, 0, "b"), true, true},
		{at(1, 0, "a"), at(2, 0, ""), true, false},
	} {
		if c.p.Before(c.q) != c.before || c.p.DifferentEpoch(c.q) != c.foreign {
			t.Errorf("%v and %v: before %v, foreign %v", c.p, c.q, c.p.Before(c.q), c.p.DifferentEpoch(c.q))
		}
	}
	p := at(7, 3, "h")
	if got := FromProto(p.Proto()); got != p {
		t.Errorf("%v on the wire is %v", p, got)
	}
	if got := PositionOf(&logv1.Event{Revision: 7, Index: 3, Epoch: "h"}); got != p {
		t.Errorf("an event at %v", got)
	}
}

// Entries keep their sequence numbers after drops. A reset also overruns a cursor that has read every entry.
func TestRing(t *testing.T) {
	var r Ring[int]
	for i := range 5 {
		r.Add(10 * i)
	}
	if r.Len() != 5 || r.Base() != 0 || r.Next() != 5 || r.Oldest() != 0 {
		t.Errorf("%d from %d to %d", r.Len(), r.Base(), r.Next())
	}
	r.Drop(2)
	if got := fmt.Sprint(r.From(0), r.From(3), r.From(5), r.From(99)); got != "[20 30 40] [30 40] [] []" {
		t.Error(got)
	}
	if n := r.Search(func(v int) bool { return v >= 30 }); n != 3 {
		t.Errorf("the first of 30 and more is %d", n)
	}
	if n := r.Search(func(int) bool { return false }); n != r.Next() {
		t.Errorf("none is %d", n)
	}
	all := r.All()
	r.DropWhile(func(v int) bool { return v < 40 })
	if fmt.Sprint(all) != "[20 30 40]" || r.Base() != 4 || r.Len() != 1 {
		t.Errorf("%v, from %d", all, r.Base())
	}
	seen := r.Next()
	r.Reset()
	if seen >= r.Base() || r.Len() != 0 || r.Next() != r.Base() {
		t.Errorf("after a reset: a cursor at %d, the base %d", seen, r.Base())
	}
}
