package cache

import (
	"fmt"
	"strings"
	"testing"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// change returns an event of a resource at a position. begun is the same event with further events in its transaction.
func change(revision int64, index int32, resource string) *logv1.Event {
	e := event(logv1.Type_TYPE_MODIFIED, revision, "a")
	e.Index, e.StorageResource, e.Epoch = index, resource, "h"
	return e
}

func begun(revision int64, index int32, resource string) *logv1.Event {
	e := change(revision, index, resource)
	e.More = true
	return e
}

func progressOf(revision int64) *logv1.Event { return &logv1.Event{Revision: revision, Epoch: "h"} }

// resetOf returns a reset of a resource, or of all resources.
func resetOf(revision int64, index int32, resource string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        revision,
		Index:           index,
		StorageResource: resource,
		Epoch:           "h",
	}
}

func eventsOf(all ...*logv1.Event) *Cache {
	c := NewEvents(8 << 20)
	for _, e := range all {
		c.Apply(e)
	}
	return c
}

// follower reads a resource's events after a position, as a watch does.
type follower struct {
	*Subscription
	position events.Position
	cursor   Cursor
	begun    bool
}

func follow(c *Cache, resource string, revision int64, index int32) *follower {
	return &follower{
		Subscription: c.Resource(resource).Subscribe(Trigger{}),
		position:     events.Position{Revision: revision, Index: index},
	}
}

// next returns the events since the last call and the revision that they reach, or "expired".
func (f *follower) next() string {
	if !f.begun {
		cur, _, ok := f.After(f.position.Revision, f.position.Index)
		if !ok {
			return "expired"
		}
		f.cursor, f.begun = cur, true
	}
	batch, cur, progress, _, ok := f.Next(f.cursor, 100)
	if !ok {
		f.begun = false
		return f.next()
	}
	f.cursor = cur
	var out []string
	for _, e := range batch {
		if p := (events.Position{Revision: e.Revision, Index: e.Index}); f.position.Before(p) {
			f.position = p
			out = append(out, fmt.Sprintf("%d.%d", e.Revision, e.Index))
		}
	}
	return fmt.Sprintf("%s to %d", strings.Join(out, " "), progress)
}

func TestEachEventIsReadOnce(t *testing.T) {
	for name, c := range map[string]struct {
		log      []*logv1.Event
		revision int64
		index    int32
		want     string
	}{
		"from the revision of a list": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"),
			change(11, 0, "pods"), change(12, 0, "roles")}, 10, lastIndex, "12.0 to 12"},
		"from before the log":      {[]*logv1.Event{change(10, 0, "roles")}, 8, lastIndex, "expired"},
		"from the log's beginning": {[]*logv1.Event{change(10, 0, "roles")}, 9, lastIndex, "10.0 to 10"},
		"from a future revision":   {[]*logv1.Event{change(10, 0, "roles")}, 11, lastIndex, " to 10"},
		"from within a transaction": {[]*logv1.Event{resetOf(9, 0, ""), begun(10, 0, "roles"),
			change(10, 1, "roles")}, 10, 0, "10.1 to 10"},
		"from within a transaction that is reset": {[]*logv1.Event{resetOf(9, 0, ""), begun(10, 0, "roles"),
			resetOf(10, 2, "roles")}, 10, 0, "expired"},
		"part of a transaction": {[]*logv1.Event{resetOf(9, 0, ""), begun(12, 0, "roles")}, 9, lastIndex, " to 9"},
		"only progress":         {[]*logv1.Event{resetOf(9, 0, ""), progressOf(15)}, 9, lastIndex, " to 15"},
		"published again": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"), change(11, 0, "roles"),
			change(10, 0, "roles"), change(11, 0, "roles"), change(12, 0, "roles")}, 9, lastIndex,
			"10.0 11.0 12.0 to 12"},
		"a lost log is refilled": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"), resetOf(8, 0, ""),
			change(9, 0, "pods"), change(10, 0, "roles"), change(11, 0, "roles")}, 9, lastIndex, "10.0 11.0 to 11"},
		"a log that begins with a gap": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"),
			resetOf(11, 0, "")}, 9, lastIndex, "expired"},
		"a transaction begun twice": {[]*logv1.Event{resetOf(9, 0, ""), begun(12, 0, "roles"),
			begun(12, 0, "roles"), change(12, 1, "roles")}, 9, lastIndex, "12.0 12.1 to 12"},
		"its resource is reset": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"),
			resetOf(11, 2, "roles"), change(12, 0, "roles")}, 9, lastIndex, "expired"},
		"a reset is published again": {[]*logv1.Event{resetOf(9, 0, ""), resetOf(10, 0, "roles"),
			change(11, 0, "roles"), resetOf(10, 0, "roles"), change(12, 0, "roles")}, 10, lastIndex, "11.0 12.0 to 12"},
		"another resource is reset": {[]*logv1.Event{resetOf(9, 0, ""), change(10, 0, "roles"),
			resetOf(11, 2, "pods"), change(12, 0, "roles")}, 9, lastIndex, "10.0 12.0 to 12"},
		"two are reset in a transaction": {[]*logv1.Event{resetOf(9, 0, ""), resetOf(11, 2, "pods"),
			resetOf(11, 4, "roles"), change(12, 0, "roles")}, 9, lastIndex, "expired"},
		"a transaction goes on after a reset": {[]*logv1.Event{resetOf(9, 0, ""), begunReset(11, 2, "pods"),
			change(11, 4, "roles")}, 9, lastIndex, "11.4 to 11"},
		"a list from after a reset": {[]*logv1.Event{resetOf(9, 0, ""), resetOf(11, 2, "roles"),
			change(12, 0, "roles")}, 11, lastIndex, "12.0 to 12"},
		"the log is reset": {[]*logv1.Event{change(10, 0, "roles"), resetOf(20, 0, ""), change(21, 0, "roles")},
			10, lastIndex, "expired"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := follow(eventsOf(c.log...), "roles", c.revision, c.index).next(); got != c.want {
				t.Errorf("%q is read, want %q", got, c.want)
			}
		})
	}
}

func begunReset(revision int64, index int32, resource string) *logv1.Event {
	e := resetOf(revision, index, resource)
	e.More = true
	return e
}

// A watch continues if the reader of the log restarts, unless the log has lost its next event.
func TestAReaderOfTheLogRestarts(t *testing.T) {
	c := NewEvents(8 << 20)
	early := follow(c, "roles", 10, lastIndex) // before the log is read
	if got := early.next(); got != " to 0" {
		t.Error(got)
	}
	c.Apply(resetOf(9, 0, ""))
	c.Apply(change(10, 0, "roles"))
	c.Apply(change(11, 0, "roles"))
	w := follow(c, "roles", 9, lastIndex)
	if got := w.next(); got != "10.0 11.0 to 11" {
		t.Error(got)
	}
	if got := early.next(); got != "11.0 to 11" {
		t.Error(got)
	}
	_, _, _, changed, _ := w.Next(w.cursor, 1)
	c.Apply(begun(12, 0, "roles"))
	c.Restart()
	c.Apply(change(11, 0, "roles")) // the log no longer has its beginning
	c.Apply(change(12, 0, "roles"))
	<-changed
	if got := w.next(); got != "12.0 to 12" {
		t.Error(got)
	}
	c.Restart()
	c.Apply(resetOf(9, 0, "")) // the log still has its beginning
	c.Apply(change(13, 0, "roles"))
	if got := w.next(); got != "13.0 to 13" {
		t.Error(got)
	}
	c.Restart()
	c.Apply(change(15, 0, "roles"))
	if got := w.next(); got != "expired" {
		t.Errorf("a watch continues over a gap: %s", got)
	}
	w = follow(c, "roles", 15, lastIndex)
	_ = w.next()
	other := change(5, 0, "roles")
	other.Epoch = "restored"
	c.Restart()
	c.Apply(other)
	if _, _, _, _, ok := w.Next(w.cursor, 1); ok || c.Epoch() != "restored" {
		t.Error("a cursor is valid in another epoch")
	}
}

// sized returns an event of a resource with an object of n bytes.
func sized(revision int64, resource string, n int) *logv1.Event {
	e := change(revision, 0, resource)
	e.Object.Json = make([]byte, n)
	return e
}

func TestEventsOfAllResourcesAreBounded(t *testing.T) {
	c := eventsOf(resetOf(1, 0, ""))
	early := follow(c, "roles", 1, lastIndex)
	_ = early.next()
	for r := int64(2); r < 40; r++ {
		c.Apply(sized(r, "roles", 1<<20))
		if n := c.ringBytes.Load(); n > 9<<20+1000 {
			t.Fatalf("%d bytes are cached", n)
		}
	}
	if got := early.next(); got != "expired" {
		t.Error(got)
	}
	if got := follow(c, "roles", 38, lastIndex).next(); got != "39.0 to 39" {
		t.Error(got)
	}
}

// The events of the largest resource are evicted first, so a tenant's large objects do not make authz list again.
func TestEvictionIsByResource(t *testing.T) {
	c := eventsOf(resetOf(1, 0, ""), change(2, 0, "roles"))
	watch := follow(c, "roles", 1, lastIndex)
	if got := watch.next(); got != "2.0 to 2" {
		t.Error(got)
	}
	idle := follow(c, "nodes", 1, lastIndex)
	named := c.Resource("configmaps").Subscribe(Trigger{ByKey, "ns/a"})
	defer named.Close()
	c.Apply(change(3, 0, "roles"))
	for r := int64(4); r < 20; r++ {
		c.Apply(sized(r, "configmaps", 9<<20)) // more than the cache holds
	}
	for r := int64(20); r < 40; r++ { // each in another resource, and larger than the last
		c.Apply(sized(r, fmt.Sprint("resource", r), 9<<20+int(r)<<10))
		if n := c.ringBytes.Load(); n > 18<<20 {
			t.Fatalf("%d bytes are cached", n)
		}
	}
	if n := named.ring.Len(); n > 0 {
		t.Errorf("a trigger holds %d evicted events", n)
	}
	if got := watch.next(); got != "3.0 to 39" {
		t.Errorf("a watch of roles reads %q", got)
	}
	if got := idle.next(); got != " to 39" {
		t.Errorf("a watch of nodes reads %q", got)
	}
	for _, f := range []struct {
		resource string
		revision int64
		want     string
	}{
		{"roles", 2, "3.0 to 39"},
		{"configmaps", 5, "expired"},
		{"configmaps", 19, " to 39"},
		{"resource39", 38, "39.0 to 39"},
	} {
		if got := follow(c, f.resource, f.revision, lastIndex).next(); got != f.want {
			t.Errorf("a watch of %s after %d reads %q, want %q", f.resource, f.revision, got, f.want)
		}
	}
	sum := int64(0)
	for _, s := range c.Resources() {
		sum += int64(s.EventBytes)
	}
	if n := c.ringBytes.Load(); n != sum {
		t.Errorf("%d bytes are counted, of %d", n, sum)
	}
}
