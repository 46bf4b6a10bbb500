package history

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// honest returns a history without a contradiction: three objects, two shards, every kind of response.
func honest() *History {
	h := New()
	ms := time.Millisecond
	h.Changes = []Change{
		{10, "ADDED", "a", "v1", "x"},
		{11, "ADDED", "b", "v2", "y"},
		{12, "MODIFIED", "a", "v3", "x"},
		{14, "MODIFIED", "a", "v4", "y"}, // leaves x
		{15, "DELETED", "b", "v2", "y"},
		{16, "ADDED", "b", "v5", "x"},
	}
	h.Writes = []Write{
		{Verb: "create", Key: "a", Value: "v1", Begin: 1 * ms, End: 2 * ms, Outcome: Acknowledged, Revision: 10},
		{Verb: "create", Key: "b", Value: "v2", Begin: 3 * ms, End: 4 * ms, Outcome: Acknowledged, Revision: 11},
		{Verb: "update", Key: "a", Value: "v3", Expect: 10, Begin: 5 * ms, End: 6 * ms, Outcome: Unknown},
		{Verb: "update", Key: "a", Value: "no", Expect: 10, Begin: 7 * ms, End: 8 * ms, Outcome: Refused, Code: 409},
		{Verb: "patch", Key: "a", Value: "v4", Begin: 9 * ms, End: 10 * ms, Outcome: Acknowledged, Revision: 14},
		{Verb: "delete", Key: "b", Expect: 11, Begin: 11 * ms, End: 12 * ms, Outcome: Acknowledged},
		{Verb: "create", Key: "b", Value: "v5", Begin: 13 * ms, End: 14 * ms, Outcome: Acknowledged, Revision: 16},
	}
	h.Reads = []Read{
		{Key: "a", Begin: 10*ms + 1, End: 11 * ms, Items: []Item{{"a", 14, "v4", "y"}}},
		{Key: "b", Begin: 12 * ms, End: 13 * ms},
		{Begin: 15 * ms, End: 16 * ms, Revision: 16, Items: []Item{{"a", 14, "v4", "y"}, {"b", 16, "v5", "x"}}},
		{Any: true, Shard: "x", Begin: 15 * ms, End: 16 * ms, Revision: 12, Items: []Item{{"a", 12, "v3", "x"}}},
		{NotOlderThan: 12, Begin: 15 * ms, End: 16 * ms, Revision: 15, Items: []Item{{"a", 14, "v4", "y"}}},
		{Exact: 15, Begin: 15 * ms, End: 16 * ms, Revision: 15, Items: []Item{{"a", 14, "v4", "y"}}},
	}
	h.Segments = []*Segment{
		{Start: 9, Begin: 1 * ms, Frames: []Frame{
			{"ADDED", Item{"a", 10, "v1", "x"}, false, 2 * ms},
			{"ADDED", Item{"b", 11, "v2", "y"}, false, 4 * ms},
			{"MODIFIED", Item{"a", 12, "v3", "x"}, false, 6 * ms},
			{"BOOKMARK", Item{Revision: 13}, false, 7 * ms},
			{"MODIFIED", Item{"a", 14, "v4", "y"}, false, 10 * ms},
			{"DELETED", Item{"b", 15, "v2", "y"}, false, 12 * ms},
			{"ADDED", Item{"b", 16, "v5", "x"}, false, 14 * ms},
		}},
		{Shard: "x", Initial: true, Begin: 7 * ms, Frames: []Frame{
			{"ADDED", Item{"a", 12, "v3", "x"}, false, 7 * ms},
			{"BOOKMARK", Item{Revision: 12}, true, 7 * ms},
			{"DELETED", Item{"a", 14, "v3", "x"}, false, 10 * ms},
			{"ADDED", Item{"b", 16, "v5", "x"}, false, 14 * ms},
		}},
		{Key: "b", Start: 9, Begin: 16 * ms, Frames: []Frame{ // long after these events
			{"ADDED", Item{"b", 11, "v2", "y"}, false, 16 * ms},
			{"BOOKMARK", Item{Revision: 13}, false, 16 * ms},
			{"DELETED", Item{"b", 15, "v2", "y"}, false, 17 * ms},
		}},
	}
	return h
}

func TestAnHonestHistoryIsFoundHonest(t *testing.T) {
	if found := honest().Check(); len(found) > 0 {
		t.Errorf("found: %v", found)
	}
}

func TestEveryKindOfFaultIsFound(t *testing.T) {
	for name, c := range map[string]struct {
		break_ func(h *History)
		says   string
	}{
		"an event is dropped": {func(h *History) {
			f := h.Segments[0]
			f.Frames = append(f.Frames[:1:1], f.Frames[2:]...)
		}, "expected ADDED of {Key:b"},
		"an event is repeated": {func(h *History) {
			f := h.Segments[0]
			f.Frames = append(f.Frames[:1:1], f.Frames...)
		}, "after 10 came ADDED"},
		"two events are swapped": {func(h *History) {
			f := h.Segments[0].Frames
			f[0], f[1] = f[1], f[0]
		}, "expected ADDED of {Key:a"},
		"a bookmark lies": {func(h *History) {
			h.Segments[0].Frames[3].Item.Revision = 15
		}, "hides MODIFIED"},
		"a bookmark goes back": {func(h *History) {
			h.Segments[0].Frames[3].Item.Revision = 11
		}, "a bookmark of 11 after 12"},
		"an event has another's content": {func(h *History) {
			h.Segments[0].Frames[4].Item.Value = "v3"
		}, "came MODIFIED"},
		"a leaving object shows its new self": {func(h *History) {
			h.Segments[1].Frames[2].Item = Item{"a", 14, "v4", "y"}
		}, "expected DELETED"},
		"initial events lack one": {func(h *History) {
			s := h.Segments[1]
			s.Frames = s.Frames[1:]
		}, "a is missing"},
		"initial events are old": {func(h *History) {
			h.Segments[1].Begin = 11 * time.Millisecond
		}, "stale watch"},
		"a resumed watch skips": {func(h *History) {
			s := h.Segments[0]
			s.Start, s.Frames = 11, s.Frames[4:]
		}, "expected MODIFIED of {Key:a Revision:12"},
		"a list is stale": {func(h *History) {
			r := &h.Reads[2]
			r.Revision, r.Items = 15, r.Items[:1]
		}, "stale list"},
		"a list is older than requested": {func(h *History) { h.Reads[4].NotOlderThan = 16 }, "requested 16 or later"},
		"a list is of another revision":  {func(h *History) { h.Reads[5].Exact = 14 }, "requested exactly 14"},
		"a watch of an object lacks an event": {func(h *History) {
			s := h.Segments[2]
			s.Frames = s.Frames[1:]
		}, "hides ADDED of b"},
		"a watch of an object gets another object": {func(h *History) {
			f := h.Segments[2].Frames
			f[0].Item = Item{"a", 10, "v1", "x"}
		}, "expected ADDED of {Key:b"},
		"a bookmark is before the watch's revision": {func(h *History) {
			s := h.Segments[2]
			s.Start, s.Frames = 14, s.Frames[1:]
		}, "a bookmark of 13 after 14"},
		"a list lacks an object": {func(h *History) {
			r := &h.Reads[2]
			r.Items = r.Items[:1]
		}, "b is missing"},
		"a list shows an old object": {func(h *History) {
			h.Reads[2].Items[0] = Item{"a", 12, "v3", "x"}
		}, "a is of 12, not of 14"},
		"a list of any age is of two ages": {func(h *History) { h.Reads[3].Revision = 14 }, "should not be there"},
		"a get is stale": {func(h *History) {
			h.Reads[0].Items[0] = Item{"a", 12, "v3", "x"}
		}, "stale get"},
		"a get finds nothing": {func(h *History) {
			h.Reads[0].Items = nil
		}, "the object existed all the time"},
		"an acknowledged write is lost":    {func(h *History) { h.Changes = h.Changes[:5] }, "lost: create of b"},
		"an acknowledged deletion is lost": {func(h *History) { h.Changes = h.Changes[:4] }, "lost: delete of b"},
		"a write is done twice": {func(h *History) {
			h.Changes = append(h.Changes, Change{17, "MODIFIED", "a", "v4", "y"})
		}, "written 2 times"},
		"a refused write is done": {func(h *History) {
			h.Writes[4].Outcome, h.Writes[4].Code = Refused, 409
		}, "done all the same"},
		"a conflict is not noticed": {func(h *History) { h.Writes[4].Expect = 10 }, "over 12"},
		"a conflict is made up":     {func(h *History) { h.Writes[3].Expect = 12 }, "all the time"},
		"an answer has the wrong revision": {func(h *History) {
			h.Writes[0].Revision = 11
		}, "answered with revision 11"},
		"writes are out of order": {func(h *History) {
			h.Writes[6].Begin, h.Writes[0].Begin, h.Writes[0].End = 0, 20*time.Millisecond, 21*time.Millisecond
		}, "was known, and was done at 10"},
	} {
		t.Run(name, func(t *testing.T) {
			h := honest()
			c.break_(h)
			found := fmt.Sprint(h.Check())
			if !strings.Contains(found, c.says) {
				t.Errorf("want %q, found:\n%s", c.says, found)
			}
		})
	}
}

func ExampleHistory_Check() {
	h := honest()
	h.Segments[0].Frames = h.Segments[0].Frames[1:]
	fmt.Println(strings.ReplaceAll(h.Check()[0].Text, "; ", ";\n"))
	// Output:
	// watch of "" from 9 at 1ms: after 9 came ADDED of {Key:b Revision:11 Value:v2 Shard:y};
	// expected ADDED of {Key:a Revision:10 Value:v1 Shard:x}
}
