package tail

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

func event(revision int64, index int32, storedAs string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_MODIFIED,
		Revision:        revision,
		Index:           index,
		StorageResource: storedAs,
		Epoch:           "h",
	}
}

func progress(revision int64) *logv1.Event { return &logv1.Event{Revision: revision, Epoch: "h"} }

func reset(revision int64, index int32, storedAs string) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision, Index: index, StorageResource: storedAs, Epoch: "h"}
}

func tailOf(t *testing.T, all ...*logv1.Event) *Tail {
	t.Helper()
	out := New()
	out.Begin()
	for _, e := range all {
		if err := out.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// told is what a reading of roles from a place on is told: events, how far that is, and what ended it.
func told(f *Reading) string {
	came, high, _, err := f.Next()
	var out []string
	for _, e := range came {
		out = append(out, fmt.Sprintf("%d.%d", e.Revision, e.Index))
	}
	s := fmt.Sprintf("%s to %d", strings.Join(out, " "), high)
	if err != nil {
		s += " " + map[bool]string{true: "overrun", false: err.Error()}[errors.Is(err, ErrExpired)]
	}
	return s
}

func TestAReadingOfTheTailIsToldEverythingOnce(t *testing.T) {
	begun := func(revision int64) *logv1.Event { // the first of a transaction
		e := event(revision, 0, "roles")
		e.More = true
		return e
	}
	for name, c := range map[string]struct {
		tail     *Tail
		revision int64
		index    int32
		want     string
	}{
		"from where it lists": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), event(11, 0, "pods"),
			event(12, 0, "roles")), 10, events.LastIndex, "12.0 to 12"},
		"from before the log":        {tailOf(t, event(10, 0, "roles")), 8, events.LastIndex, " to 0 overrun"},
		"from the log's beginning":   {tailOf(t, event(10, 0, "roles")), 9, events.LastIndex, "10.0 to 10"},
		"from what has not come yet": {tailOf(t, event(10, 0, "roles")), 11, events.LastIndex, " to 10"},
		"from amid a transaction": {tailOf(t, reset(9, 0, ""), begun(10), event(10, 1, "roles")),
			10, 0, "10.1 to 10"},
		"amid a transaction":   {tailOf(t, reset(9, 0, ""), begun(12)), 9, events.LastIndex, "12.0 to 9"},
		"nothing but progress": {tailOf(t, reset(9, 0, ""), progress(15)), 9, events.LastIndex, " to 15"},
		"published again": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), event(11, 0, "roles"),
			event(10, 0, "roles"), event(11, 0, "roles"), event(12, 0, "roles")), 9, events.LastIndex,
			"10.0 11.0 12.0 to 12"},
		"a log that was lost begins again": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(8, 0, ""),
			event(9, 0, "pods"), event(10, 0, "roles"), event(11, 0, "roles")), 9, events.LastIndex, "10.0 11.0 to 11"},
		"a log that begins with a gap": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 0, "")), 9,
			events.LastIndex, " to 0 overrun"},
		"a transaction begun twice": {tailOf(t, reset(9, 0, ""), begun(12), begun(12), event(12, 1, "roles")), 9,
			events.LastIndex, "12.0 12.1 to 12"},
		"its resource is to be read anew": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 2, "roles"),
			event(12, 0, "roles")), 9, events.LastIndex, "10.0 to 12 overrun"},
		"another resource is": {tailOf(t, reset(9, 0, ""), event(10, 0, "roles"), reset(11, 2, "pods"),
			event(12, 0, "roles")), 9, events.LastIndex, "10.0 12.0 to 12"},
		"two are, in one transaction": {tailOf(t, reset(9, 0, ""), reset(11, 2, "pods"), reset(11, 4, "roles"),
			event(12, 0, "roles")), 9, events.LastIndex, " to 12 overrun"},
		"a list from after that": {tailOf(t, reset(9, 0, ""), reset(11, 2, "roles"), event(12, 0, "roles")),
			11, events.LastIndex, "12.0 to 12"},
		"the log began anew": {tailOf(t, event(10, 0, "roles"), reset(20, 0, ""), event(21, 0, "roles")),
			10, events.LastIndex, " to 0 overrun"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := told(c.tail.Read("roles", events.Position{Revision: c.revision, Index: c.index})); got != c.want {
				t.Errorf("told %q, not %q", got, c.want)
			}
		})
	}
}

func TestAReadingGoesOn(t *testing.T) {
	l := tailOf(t, reset(9, 0, ""), event(10, 0, "roles"))
	f := l.Read("roles", events.Position{Revision: 9, Index: events.LastIndex})
	if got := told(f); got != "10.0 to 10" {
		t.Error(got)
	}
	_, _, changed, _ := f.Next()
	_ = l.Append(event(11, 0, "roles"))
	<-changed
	if got := told(f); got != "11.0 to 11" {
		t.Error(got)
	}
	l.Begin() // the reader of the log was started again
	if got := told(f); got != " to 0 overrun" {
		t.Error(got)
	}
	f = l.Read("roles", events.Position{Revision: 11, Index: events.LastIndex})
	if got := told(f); got != " to 0" { // nothing is known yet
		t.Error(got)
	}
	_ = l.Append(event(11, 0, "roles"))
	_ = l.Append(event(12, 0, "roles"))
	if got := told(f); got != "12.0 to 12" {
		t.Error(got)
	}
	other := event(5, 0, "roles")
	other.Epoch = "restored"
	_ = l.Append(other)
	if got := told(f); got != " to 0 overrun" {
		t.Errorf("a reading goes on in another history: %s", got)
	}
}

func TestTheTailIsBoundedInBytes(t *testing.T) {
	l := tailOf(t, reset(1, 0, ""))
	early := l.Read("roles", events.Position{Revision: 1, Index: events.LastIndex})
	_, _, _, _ = early.Next()
	big := make([]byte, 1<<20)
	for r := int64(2); r < 40; r++ {
		e := event(r, 0, "roles")
		e.Object = &logv1.Object{Json: big}
		_ = l.Append(e)
		if l.bytes > tailBytes+len(big)+100 {
			t.Fatalf("%d bytes are kept", l.bytes)
		}
	}
	if got := told(early); got != " to 0 overrun" {
		t.Error(got)
	}
	if got := told(l.Read("roles", events.Position{Revision: 38, Index: events.LastIndex})); got != "39.0 to 39" {
		t.Error(got)
	}
}

// What one resource takes is given up before another's: whoever decides is not sent to list by a tenant's large
// objects.
func TestLargeEventsPushOutTheirOwn(t *testing.T) {
	l := tailOf(t, reset(1, 0, ""), event(2, 0, "roles"))
	reading := l.Read("roles", events.Position{Revision: 1, Index: events.LastIndex, Epoch: "h"})
	if got := told(reading); got != "2.0 to 2" {
		t.Error(got)
	}
	idle := l.Read("nodes", events.Position{Revision: 1, Index: events.LastIndex, Epoch: "h"})
	_ = l.Append(event(3, 0, "roles"))
	for r := int64(4); r < 20; r++ {
		e := event(r, 0, "configmaps")
		e.Object = &logv1.Object{Json: make([]byte, 9<<20)} // more than is kept at all
		_ = l.Append(e)
	}
	for r := int64(20); r < 40; r++ { // each of another resource, and larger than the one before
		e := event(r, 0, fmt.Sprint("resource", r))
		e.Object = &logv1.Object{Json: make([]byte, 9<<20+r<<10)}
		_ = l.Append(e)
		if l.bytes > tailBytes+10<<20 {
			t.Fatalf("%d bytes are kept", l.bytes)
		}
	}
	if got := told(reading); got != "3.0 to 39" {
		t.Errorf("who reads roles is told %q", got)
	}
	if got := told(idle); got != " to 39" {
		t.Errorf("who reads nodes is told %q", got)
	}
	if got := told(l.Read("roles", events.Position{
		Revision: 2,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != "3.0 to 39" {
		t.Errorf("who comes from a list is told %q", got)
	}
	if got := told(l.Read("configmaps", events.Position{
		Revision: 5,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != " to 0 overrun" {
		t.Errorf("who reads what is gone is told %q", got)
	}
	if got := told(l.Read("configmaps", events.Position{
		Revision: 19,
		Index:    events.LastIndex,
		Epoch:    "h",
	})); got != " to 39" {
		t.Errorf("who has seen it is told %q", got)
	}
	if got := told(l.Read("roles", events.Position{
		Revision: 19,
		Index:    events.LastIndex,
		Epoch:    "restored",
	})); got != " to 0 overrun" {
		t.Errorf("who comes from another history is told %q", got)
	}
}

// The tail is fresh once it has come to where etcd was, however far that is by now.
func TestFreshIsWhatHasComeToWhereEtcdWas(t *testing.T) {
	l := tailOf(t, reset(9, 0, ""), event(10, 0, "roles"))
	if l.Fresh() {
		t.Error("it is fresh before etcd was asked")
	}
	l.asked, l.revision = time.Now(), 11
	if l.Fresh() {
		t.Error("it is fresh without what etcd has")
	}
	_ = l.Append(event(11, 0, "roles"))
	if !l.Fresh() {
		t.Error("it has what etcd had, and is not fresh")
	}
	l.caughtUp, l.asked, l.revision = time.Now().Add(-freshFor), time.Now(), 12
	if l.Fresh() {
		t.Error("it is fresh for ever")
	}
}
