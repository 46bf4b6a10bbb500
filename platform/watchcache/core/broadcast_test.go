package core

import (
	"fmt"
	"testing"
	"time"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A broadcast without traffic drops the entries that all receivers have seen, and no other entry.
func TestABroadcastDropsAgedEntries(t *testing.T) {
	b := NewBroadcast(events.Position{Revision: 1})
	now := time.Now()
	seen, behind := &Receiver{Direct: true}, &Receiver{}
	for _, r := range []*Receiver{seen, behind} {
		if !b.Join(r, events.Position{Revision: 1}) {
			t.Fatal("a receiver cannot join")
		}
	}
	add := func(revision int64) {
		at := events.Position{Revision: revision}.Proto()
		d := b.Add(&watchfanoutv1.WatchFrame{Data: []byte("event"), Position: at,
			Boundaries: []*watchfanoutv1.EventBoundary{{End: 5, Position: at}}})
		b.Delivered(seen, &d)
	}
	drop := func() string {
		if b.TrimDue(1<<20, 1<<20, now) {
			b.Trim(1<<20, 1<<20, min(seen.Cursor, behind.Cursor), now)
		}
		return fmt.Sprintf("%d entries, %d bytes", b.entries.Len(), b.Bytes)
	}
	want := func(what, want string) {
		t.Helper()
		if got := drop(); got != want {
			t.Errorf("%s: %s: want %s", what, got, want)
		}
	}
	add(2)
	add(3)
	want("new entries", "2 entries, 106 bytes")
	now = now.Add(seenAge)
	want("aged entries that a receiver needs", "2 entries, 106 bytes")
	pending, err := b.Pending(behind)
	if err != nil || len(pending.Parts) != 2 {
		t.Fatalf("%d entries are pending: %v", len(pending.Parts), err)
	}
	if _, _, err := b.Take(behind, pending, now); err != nil {
		t.Fatal(err)
	}
	add(4)
	want("before the next period", "3 entries, 159 bytes")
	now = now.Add(seenAge)
	want("aged entries that all have seen", "1 entries, 53 bytes")
	if b.Joinable(events.Position{Revision: 2}) || !b.Joinable(events.Position{Revision: 3}) {
		t.Error("a watch joins before a dropped entry, or not after it")
	}
}
