package watchcache

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

func event(revision int64, index int32, storageResource string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_MODIFIED,
		Revision:        revision,
		Index:           index,
		StorageResource: storageResource,
		Epoch:           "h",
	}
}

func progress(revision int64) *logv1.Event { return &logv1.Event{Revision: revision, Epoch: "h"} }

func reset(revision int64, index int32, storageResource string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        revision,
		Index:           index,
		StorageResource: storageResource,
		Epoch:           "h",
	}
}

func newCacheOf(t *testing.T, all ...*logv1.Event) *Cache {
	t.Helper()
	out := New()
	out.Reset()
	for _, e := range all {
		if err := out.Apply(e); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// next returns the result of Next as text: events, revision, and whether it expired.
func next(w *Watcher) string {
	batch, high, _, err := w.Next()
	var out []string
	for _, e := range batch {
		out = append(out, fmt.Sprintf("%d.%d", e.Revision, e.Index))
	}
	s := fmt.Sprintf("%s to %d", strings.Join(out, " "), high)
	if err != nil {
		s += " " + map[bool]string{true: "overrun", false: err.Error()}[errors.Is(err, ErrExpired)]
	}
	return s
}

func TestWatcherReturnsEachEventOnce(t *testing.T) {
	begun := func(revision int64) *logv1.Event { // the first event of a transaction
		e := event(revision, 0, "roles")
		e.More = true
		return e
	}
	for name, c := range map[string]struct {
		tail     *Cache
		revision int64
		index    int32
		want     string
	}{
		"from where it lists": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), event(11, 0, "pods"),
			event(12, 0, "roles")), 10, events.LastIndex, "12.0 to 12"},
		"from before the log":      {newCacheOf(t, event(10, 0, "roles")), 8, events.LastIndex, " to 0 overrun"},
		"from the log's beginning": {newCacheOf(t, event(10, 0, "roles")), 9, events.LastIndex, "10.0 to 10"},
		"from a future revision":   {newCacheOf(t, event(10, 0, "roles")), 11, events.LastIndex, " to 10"},
		"from within a transaction": {newCacheOf(t, reset(9, 0, ""), begun(10), event(10, 1, "roles")),
			10, 0, "10.1 to 10"},
		"part of a transaction": {newCacheOf(t, reset(9, 0, ""), begun(12)), 9, events.LastIndex, "12.0 to 9"},
		"nothing but progress":  {newCacheOf(t, reset(9, 0, ""), progress(15)), 9, events.LastIndex, " to 15"},
		"published again": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), event(11, 0, "roles"),
			event(10, 0, "roles"), event(11, 0, "roles"), event(12, 0, "roles")), 9, events.LastIndex,
			"10.0 11.0 12.0 to 12"},
		"a lost log is refilled": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(8, 0, ""),
			event(9, 0, "pods"), event(10, 0, "roles"), event(11, 0, "roles")), 9, events.LastIndex, "10.0 11.0 to 11"},
		"a log that begins with a gap": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 0, "")), 9,
			events.LastIndex, " to 0 overrun"},
		"a transaction begun twice": {newCacheOf(t, reset(9, 0, ""), begun(12), begun(12), event(12, 1, "roles")), 9,
			events.LastIndex, "12.0 12.1 to 12"},
		"its resource is reset": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 2, "roles"),
			event(12, 0, "roles")), 9, events.LastIndex, "10.0 to 12 overrun"},
		"another resource is": {newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 2, "pods"),
			event(12, 0, "roles")), 9, events.LastIndex, "10.0 12.0 to 12"},
		"two are, in one transaction": {newCacheOf(t, reset(9, 0, ""), reset(11, 2, "pods"), reset(11, 4, "roles"),
			event(12, 0, "roles")), 9, events.LastIndex, " to 12 overrun"},
		"a list from after that": {newCacheOf(t, reset(9, 0, ""), reset(11, 2, "roles"), event(12, 0, "roles")),
			11, events.LastIndex, "12.0 to 12"},
		"the log was reset": {newCacheOf(t, event(10, 0, "roles"), reset(20, 0, ""), event(21, 0, "roles")),
			10, events.LastIndex, " to 0 overrun"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := next(
				c.tail.Watch("roles", events.Position{Revision: c.revision, Index: c.index}),
			); got != c.want {
				t.Errorf("Next returns %q, not %q", got, c.want)
			}
		})
	}
}

func TestWatcherResumes(t *testing.T) {
	l := newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"))
	w := l.Watch("roles", events.Position{Revision: 9, Index: events.LastIndex})
	if got := next(w); got != "10.0 to 10" {
		t.Error(got)
	}
	_, _, changed, _ := w.Next()
	_ = l.Apply(event(11, 0, "roles"))
	<-changed
	if got := next(w); got != "11.0 to 11" {
		t.Error(got)
	}
	l.Reset() // the reader of the log was restarted
	if got := next(w); got != " to 0 overrun" {
		t.Error(got)
	}
	w = l.Watch("roles", events.Position{Revision: 11, Index: events.LastIndex})
	if got := next(w); got != " to 0" { // no message was applied
		t.Error(got)
	}
	_ = l.Apply(event(11, 0, "roles"))
	_ = l.Apply(event(12, 0, "roles"))
	if got := next(w); got != "12.0 to 12" {
		t.Error(got)
	}
	other := event(5, 0, "roles")
	other.Epoch = "restored"
	_ = l.Apply(other)
	if got := next(w); got != " to 0 overrun" {
		t.Errorf("a watcher continues in another epoch: %s", got)
	}
}

func TestCacheIsBounded(t *testing.T) {
	l := newCacheOf(t, reset(1, 0, ""))
	early := l.Watch("roles", events.Position{Revision: 1, Index: events.LastIndex})
	_, _, _, _ = early.Next()
	big := make([]byte, 1<<20)
	for r := int64(2); r < 40; r++ {
		e := event(r, 0, "roles")
		e.Object = &logv1.Object{Json: big}
		_ = l.Apply(e)
		if l.bytes > maxBytes+len(big)+100 {
			t.Fatalf("%d bytes are cached", l.bytes)
		}
	}
	if got := next(early); got != " to 0 overrun" {
		t.Error(got)
	}
	if got := next(l.Watch("roles", events.Position{Revision: 38, Index: events.LastIndex})); got != "39.0 to 39" {
		t.Error(got)
	}
}

// The events of the largest resource are evicted first, so a tenant's large objects do not make authz list again.
func TestEvictionIsByResource(t *testing.T) {
	l := newCacheOf(t, reset(1, 0, ""), event(2, 0, "roles"))
	watcher := l.Watch("roles", events.Position{Revision: 1, Index: events.LastIndex, Epoch: "h"})
	if got := next(watcher); got != "2.0 to 2" {
		t.Error(got)
	}
	idle := l.Watch("nodes", events.Position{Revision: 1, Index: events.LastIndex, Epoch: "h"})
	_ = l.Apply(event(3, 0, "roles"))
	for r := int64(4); r < 20; r++ {
		e := event(r, 0, "configmaps")
		e.Object = &logv1.Object{Json: make([]byte, 9<<20)} // more than the cache holds
		_ = l.Apply(e)
	}
	for r := int64(20); r < 40; r++ { // each in another resource, and larger than the last
		e := event(r, 0, fmt.Sprint("resource", r))
		e.Object = &logv1.Object{Json: make([]byte, 9<<20+r<<10)}
		_ = l.Apply(e)
		if l.bytes > maxBytes+10<<20 {
			t.Fatalf("%d bytes are cached", l.bytes)
		}
	}
	if got := next(watcher); got != "3.0 to 39" {
		t.Errorf("a watcher of roles reads %q", got)
	}
	if got := next(idle); got != " to 39" {
		t.Errorf("a watcher of nodes reads %q", got)
	}
	if got := next(l.Watch("roles", events.Position{
		Revision: 2,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != "3.0 to 39" {
		t.Errorf("a watcher after a list reads %q", got)
	}
	if got := next(l.Watch("configmaps", events.Position{
		Revision: 5,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != " to 0 overrun" {
		t.Errorf("a watcher of evicted events reads %q", got)
	}
	if got := next(l.Watch("configmaps", events.Position{
		Revision: 19,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != " to 39" {
		t.Errorf("a watcher past the evicted events reads %q", got)
	}
	if got := next(l.Watch("roles", events.Position{
		Revision: 19,
		Index:    events.LastIndex,
		Epoch:    "restored",
	})); got != " to 0 overrun" {
		t.Errorf("a watcher of another epoch reads %q", got)
	}
}

// The cache is fresh once it has reached the revision that etcd returned, even if etcd has advanced since.
func TestFresh(t *testing.T) {
	l := newCacheOf(t, reset(9, 0, ""), event(10, 0, "roles"))
	if l.Fresh() {
		t.Error("it is fresh before a revision was requested")
	}
	l.requestedAt, l.etcdRevision = time.Now(), 11
	if l.Fresh() {
		t.Error("it is fresh before it has reached etcd's revision")
	}
	_ = l.Apply(event(11, 0, "roles"))
	if !l.Fresh() {
		t.Error("it has reached etcd's revision, and is not fresh")
	}
	l.caughtUpAt, l.requestedAt, l.etcdRevision = time.Now().Add(-maxStaleness), time.Now(), 12
	if l.Fresh() {
		t.Error("it is fresh for ever")
	}
}
