package watch

import (
	"slices"
	"testing"

	"watershed.dev/platform/watchcache/cache"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// A watch sends a backfill in pieces. Each event is sent once, and each piece is bounded, whatever the size of the
// backfill and of its transactions.
func TestABackfillIsSentInPieces(t *testing.T) {
	var all []*cache.Event
	for revision := int64(10); revision < 30; revision++ {
		for index := range int32(3) {
			all = append(all, &cache.Event{
				Revision: revision,
				Index:    index,
				Item:     cache.ItemOf(&registryv1.Row{Json: make([]byte, int(revision%5)*100<<10)}),
			})
		}
	}
	w := &watcher{}
	w.setPosition(10, 1)
	var seen []*cache.Event
	for complete := false; !complete; {
		var events []*cache.Event
		var size int
		events, size, complete = w.piece(all, backfillPiece)
		bytes := 0
		for _, e := range events {
			bytes += e.Size()
		}
		if size != bytes {
			t.Errorf("piece reports %d bytes, its events have %d", size, bytes)
		}
		if len(events) == 0 || len(events) > 1 && bytes > backfillPiece || cap(events) > 2*len(events)+8 {
			t.Fatalf("%d events of %d bytes, of a backfill of %d", len(events), bytes, len(all))
		}
		seen = append(seen, events...)
		w.advanceTo(events[len(events)-1])
	}
	if !slices.Equal(seen, all[2:]) {
		t.Errorf("%d events were taken, of %d", len(seen), len(all)-2)
	}
}
