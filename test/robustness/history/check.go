package history

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"time"
)

// Contradiction is a response or an event that contradicts etcd's changes.
type Contradiction struct {
	// At is when the client received it. 0: the time is unknown.
	At   time.Duration
	Text string
}

func (c Contradiction) String() string { return c.Text }

// Check compares all responses and watch events with etcd's changes, and returns every contradiction.
func (h *History) Check() []Contradiction {
	c := &checker{h: h, byKey: map[string][]Change{}, byValue: map[string][]Change{}, at: map[int64]Change{}}
	c.index()
	c.writes()
	for _, r := range h.Reads {
		c.now = r.End
		c.read(r)
	}
	for _, s := range h.Segments {
		c.now = s.Begin
		c.segment(s)
	}
	return c.found
}

type checker struct {
	h       *History
	byKey   map[string][]Change
	byValue map[string][]Change
	at      map[int64]Change
	// seen: a client had received the revision at that time. begun: its write had not begun before that time.
	seen, begun []known
	// now is the time of the response that is being checked.
	now   time.Duration
	found []Contradiction
}

type known struct {
	at       time.Duration
	revision int64
}

func (c *checker) wrong(format string, args ...any) {
	c.found = append(c.found, Contradiction{c.now, fmt.Sprintf(format, args...)})
}

func (c *checker) index() {
	for _, e := range c.h.Changes {
		c.byKey[e.Key] = append(c.byKey[e.Key], e)
		c.at[e.Revision] = e
		if e.Type != "DELETED" {
			c.byValue[e.Value] = append(c.byValue[e.Value], e)
		}
	}
	for _, w := range c.h.Writes {
		if r, ok := c.done(w); ok && (w.Outcome == Acknowledged ||
			w.Verb != "delete") { // a deletion without a response may have found the object deleted
			c.begun = append(c.begun, known{w.Begin, r})
			if w.Outcome == Acknowledged {
				c.seen = append(c.seen, known{w.End, r})
			}
		}
	}
	for _, s := range c.h.Segments {
		for _, f := range s.Frames {
			if f.Type != "BOOKMARK" && !(s.Initial && f.Item.Revision == 0) {
				c.seen = append(c.seen, known{f.At, f.Item.Revision})
			}
		}
	}
	for _, r := range c.h.Reads {
		for _, i := range r.Items {
			c.seen = append(c.seen, known{r.End, i.Revision})
		}
	}
	sort.Slice(c.seen, func(i, j int) bool { return c.seen[i].at < c.seen[j].at })
	for i := 1; i < len(c.seen); i++ {
		c.seen[i].revision = max(c.seen[i].revision, c.seen[i-1].revision)
	}
	sort.Slice(c.begun, func(i, j int) bool { return c.begun[i].at < c.begun[j].at })
	for i := len(c.begun) - 2; i >= 0; i-- {
		c.begun[i].revision = min(c.begun[i].revision, c.begun[i+1].revision)
	}
}

// atLeast returns the newest revision that any client had received before t. A later request must not be older.
func (c *checker) atLeast(t time.Duration) int64 {
	i := sort.Search(len(c.seen), func(i int) bool { return c.seen[i].at >= t })
	if i == 0 {
		return 0
	}
	return c.seen[i-1].revision
}

// before returns the oldest revision whose write began after t. A response that ended by t cannot contain it.
func (c *checker) before(t time.Duration) int64 {
	i := sort.Search(len(c.begun), func(i int) bool { return c.begun[i].at > t })
	if i == len(c.begun) {
		return math.MaxInt64
	}
	return c.begun[i].revision
}

// done returns the revision of a write's change, and whether there is a change.
func (c *checker) done(w Write) (int64, bool) {
	if w.Verb != "delete" {
		if made := c.byValue[w.Value]; len(made) > 0 {
			return made[0].Revision, true
		}
		return 0, false
	}
	changes := c.byKey[w.Key]
	for i, e := range changes {
		if e.Revision == w.Expect {
			if i+1 < len(changes) && changes[i+1].Type == "DELETED" {
				return changes[i+1].Revision, true
			}
			return 0, false
		}
	}
	return 0, false
}

// current returns the change that made a key's state at a revision. next is the revision of the following change.
func (c *checker) current(key string, revision int64) (e Change, exists bool, next int64) {
	changes := c.byKey[key]
	i := sort.Search(len(changes), func(i int) bool { return changes[i].Revision > revision })
	next = math.MaxInt64
	if i < len(changes) {
		next = changes[i].Revision
	}
	if i == 0 {
		return Change{}, false, next
	}
	return changes[i-1], changes[i-1].Type != "DELETED", next
}

func (c *checker) writes() {
	written := map[string]Write{}
	for _, w := range c.h.Writes {
		if w.Verb != "delete" {
			written[w.Value] = w
		}
	}
	for value, made := range c.byValue {
		if _, ok := written[value]; !ok {
			c.wrong("etcd has %q at %d, which no client wrote", value, made[0].Revision)
		}
		if len(made) > 1 {
			c.wrong("%q was written %d times: at %d and %d", value, len(made), made[0].Revision, made[1].Revision)
		}
	}
	for _, w := range c.h.Writes {
		c.now = w.End
		c.write(w)
	}
}

func (c *checker) write(w Write) {
	revision, done := c.done(w)
	if done && w.Expect > 0 {
		if e, exists, _ := c.current(w.Key, revision-1); !exists || e.Revision != w.Expect {
			c.wrong("%s of %s expected %d and was done at %d over %d", w.Verb, w.Key, w.Expect, revision, e.Revision)
		}
	}
	if done && w.Verb == "create" && c.at[revision].Type != "ADDED" {
		c.wrong("create of %s at %d replaced an object", w.Key, revision)
	}
	switch {
	case w.Outcome == Acknowledged && !done:
		c.wrong("lost: %s of %s (%q, expecting %d) was acknowledged at %v and is not in etcd", w.Verb,
			w.Key, w.Value, w.Expect, w.End)
	case w.Outcome == Acknowledged && w.Revision != 0 && w.Revision != revision:
		c.wrong("%s of %s (%q) was answered with revision %d and done at %d", w.Verb, w.Key,
			w.Value, w.Revision, revision)
	case w.Outcome == Acknowledged && revision <= c.atLeast(w.Begin):
		c.wrong("%s of %s began at %v, when %d was known, and was done at %d", w.Verb, w.Key,
			w.Begin, c.atLeast(w.Begin), revision)
	case w.Outcome == Refused && done && w.Verb != "delete": // a concurrent deletion may have deleted the object
		c.wrong("%s of %s (%q) was refused with %d and done all the same at %d", w.Verb, w.Key,
			w.Value, w.Code, revision)
	case w.Outcome == Refused && w.Expect > 0 && w.Code == 409:
		if e, exists, next := c.current(w.Key, c.atLeast(w.Begin)); exists && e.Revision == w.Expect &&
			next >= c.before(w.End) {
			c.wrong("%s of %s expecting %d was refused at %v though that was its revision all the time",
				w.Verb, w.Key, w.Expect, w.End)
		}
	}
}

// shown compares an object in a response with the change of its revision.
func (c *checker) shown(source string, i Item) {
	e, ok := c.at[i.Revision]
	switch {
	case !ok || e.Key != i.Key:
		c.wrong("%s: %s at %d, which was never so", source, i.Key, i.Revision)
	case e.Value != i.Value || e.Shard != i.Shard:
		c.wrong("%s: %s at %d with %q, which was %q", source, i.Key, i.Revision, i.Value, e.Value)
	}
}

func (c *checker) read(r Read) {
	least, most := c.atLeast(r.Begin), c.before(r.End)
	if r.Key != "" {
		c.get(r, least, most)
		return
	}
	source := fmt.Sprintf("list of %q at %v (revision %d)", r.Shard, r.Begin, r.Revision)
	switch {
	case r.Any:
	case r.Exact > 0:
		if r.Revision != r.Exact {
			c.wrong("%s: the client requested exactly %d", source, r.Exact)
		}
	case r.NotOlderThan > 0:
		if r.Revision < r.NotOlderThan {
			c.wrong("stale %s: the client requested %d or later", source, r.NotOlderThan)
		}
	case r.Revision < least:
		c.wrong("stale %s: %d was known before it began", source, least)
	}
	if r.Revision >= most {
		c.wrong("%s shows a write that began after the response: %d", source, most)
	}
	c.state(source, "", r.Shard, r.Revision, r.Items)
}

func (c *checker) get(r Read, least, most int64) {
	source := fmt.Sprintf("get of %s from %v to %v", r.Key, r.Begin, r.End)
	if len(r.Items) == 1 {
		i := r.Items[0]
		c.shown(source, i)
		if _, _, next := c.current(i.Key, i.Revision); next <= least || i.Revision >= most {
			c.wrong("stale %s: shown at %d, replaced at %d, when %d was known", source, i.Revision, next, least)
		}
		return
	}
	for revision := least; ; { // was it deleted at any moment?
		_, exists, next := c.current(r.Key, revision)
		if !exists {
			return
		}
		if next >= most {
			c.wrong("%s found nothing, but the object existed all the time (at %d)", source, revision)
			return
		}
		revision = next
	}
}

// state compares a response's objects with the complete state at a revision, or with the state of a single object.
func (c *checker) state(source, only, shard string, revision int64, items []Item) {
	got := map[string]Item{}
	for _, i := range items {
		if _, twice := got[i.Key]; twice {
			c.wrong("%s: %s twice", source, i.Key)
		}
		got[i.Key] = i
		c.shown(source, i)
	}
	for key := range c.byKey {
		e, exists, _ := c.current(key, revision)
		exists = exists && (only == "" || only == key) && (shard == "" || e.Shard == shard)
		i, ok := got[key]
		switch {
		case exists && !ok:
			c.wrong("%s: %s is missing (there since %d)", source, key, e.Revision)
		case !exists && ok:
			c.wrong("%s: %s at %d should not be there", source, key, i.Revision)
		case exists && i.Revision != e.Revision:
			c.wrong("%s: %s is of %d, not of %d", source, key, i.Revision, e.Revision)
		}
	}
}

// segment checks the events of a watch's connection: none is missing, repeated or invented.
func (c *checker) segment(s *Segment) {
	source := fmt.Sprintf("watch of %q from %d at %v", s.Key+s.Shard, s.Start, s.Begin)
	frames := s.Frames
	position := s.Start
	if s.Initial {
		end := slices.IndexFunc(frames, func(f Frame) bool { return f.InitialEnd })
		if end < 0 { // it ended during the initial events, which must be true all the same
			for _, f := range frames {
				c.shown(source, f.Item)
			}
			return
		}
		var items []Item
		for _, f := range frames[:end] {
			if f.Type != "ADDED" {
				c.wrong("%s: %s among the initial events", source, f.Type)
			}
			items = append(items, f.Item)
		}
		position, c.now = frames[end].Item.Revision, frames[end].At
		if least := c.atLeast(s.Begin); position < least {
			c.wrong("stale %s: initial events of %d, when %d was known", source, position, least)
		}
		c.state(source+": initial events", s.Key, s.Shard, position, items)
		frames = frames[end+1:]
	}
	want := c.expected(s, position)
	for _, f := range frames {
		c.now = f.At
		if f.Type == "BOOKMARK" {
			if f.Item.Revision < position {
				c.wrong("%s: a bookmark of %d after %d", source, f.Item.Revision, position)
			}
			if len(want) > 0 && want[0].Item.Revision <= f.Item.Revision {
				c.wrong("%s: a bookmark of %d hides %s of %s at %d", source, f.Item.Revision, want[0].Type,
					want[0].Item.Key, want[0].Item.Revision)
				return
			}
			position = f.Item.Revision
			continue
		}
		if len(want) == 0 {
			c.wrong("%s: %s of %s at %d, which never came", source, f.Type, f.Item.Key, f.Item.Revision)
			return
		}
		if w := want[0]; f.Type != w.Type || f.Item != w.Item {
			c.wrong("%s: after %d came %s of %+v; expected %s of %+v", source, position, f.Type, f.Item, w.Type, w.Item)
			return
		}
		position, want = f.Item.Revision, want[1:]
	}
}

// expected returns the events of a watch from after a revision to the last revision that the watch received.
func (c *checker) expected(s *Segment, after int64) []Frame {
	last := int64(0)
	for _, f := range s.Frames {
		last = max(last, f.Item.Revision)
	}
	first := sort.Search(len(c.h.Changes), func(i int) bool { return c.h.Changes[i].Revision > after })
	var out []Frame
	for _, e := range c.h.Changes[first:] {
		if e.Revision > last {
			break
		}
		if s.Key != "" && s.Key != e.Key {
			continue
		}
		f := Frame{Type: e.Type, Item: Item{e.Key, e.Revision, e.Value, e.Shard}}
		if shard := s.Shard; shard != "" {
			now := e.Shard == shard
			old, existed, _ := c.current(e.Key, e.Revision-1)
			before := existed && old.Shard == shard
			switch {
			case e.Type == "DELETED" && !before, e.Type == "ADDED" && !now, !now && !before:
				continue
			case e.Type == "MODIFIED" && now && !before:
				f.Type = "ADDED"
			case e.Type == "MODIFIED" && !now: // the event has the last state that matched the selector
				f.Type, f.Item.Value, f.Item.Shard = "DELETED", old.Value, old.Shard
			}
		}
		out = append(out, f)
	}
	return out
}
