package watch

import (
	"testing"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// feedOf is a feed of a hub's that nobody reads a stream for.
func feedOf(h *Hub) *feed {
	f := &feed{
		hub:    h,
		low:    events.Position{Revision: 1},
		high:   events.Position{Revision: 1},
		cancel: func() {},
	}
	h.room().enter(f)
	return f
}

// keeps is how many bytes a feed keeps.
func (f *feed) keeps() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes
}

// frameOf is one event of n bytes.
func frameOf(revision int64, n int) *watchfanoutv1.WatchFrame {
	return &watchfanoutv1.WatchFrame{
		Data:       make([]byte, n),
		Position:   &watchfanoutv1.Position{Revision: revision},
		Boundaries: []*watchfanoutv1.EventBoundary{{End: int32(n), Position: &watchfanoutv1.Position{Revision: revision}}},
	}
}

// Where there is not enough for all each feed has an equal part, and one that keeps less loses nothing to others.
func TestFeedsShareWhatTheyMayKeep(t *testing.T) {
	const bound = 10 << 20
	h := hub(newTier())
	h.Config.FeedBytes, h.Config.FeedsBytes = 4<<20, bound
	behind := func(events int64) *feed {
		f := feedOf(h)
		f.join(f.low) // and never reads
		for r := range events {
			f.broadcast(frameOf(2+r, 10_000))
		}
		return f
	}
	quiet := behind(15)
	kept := quiet.keeps()
	for range 3 {
		behind(1000) // together they take all that there is
	}
	for range 40 {
		behind(40)
	}
	quiet.broadcast(frameOf(100, 10_000))
	if n := quiet.keeps(); n < kept {
		t.Errorf("of the %d bytes that one that is little behind kept it has %d", kept, n)
	}
	h.room().trim()
	if n := h.room().held.Load(); n > bound {
		t.Errorf("all keep %d bytes", n)
	}
	for range 300 { // which keep little
		f := behind(1)
		f.leave(f.subs[0])
	}
	h.room().trim()
	if n := quiet.keeps(); n < kept {
		t.Errorf("of the %d bytes that one that is little behind kept it has %d", kept, n)
	}
}

// A feed keeps little of what everybody has seen, and all feeds together keep no more than the bound (F5, S13).
func TestFeedsKeepLittleOfWhatHasBeenSeen(t *testing.T) {
	h := hub(newTier())
	h.Config.FeedBytes, h.Config.FeedsBytes = 4<<20, 3<<20
	var feeds []*feed
	for range 100 {
		feeds = append(feeds, feedOf(h))
	}
	for _, f := range feeds {
		s := f.join(events.Position{Revision: 1})
		for r := int64(2); r < 60; r++ {
			f.broadcast(frameOf(r, 20_000))
			if _, err := f.next(s); err != nil {
				t.Fatal(err)
			}
		}
		if n := f.keeps(); n > 2*keptRecent+40_000 {
			t.Fatalf("a feed whose only client has seen everything keeps %d bytes", n)
		}
		f.leave(s)
		f.end()
	}
	if n := h.room().held.Load(); n != 0 {
		t.Errorf("%d bytes are told to be kept by feeds that have ended", n)
	}
	for i := range feeds {
		feeds[i] = feedOf(h)
		feeds[i].join(events.Position{Revision: 1}) // and never reads
		for r := int64(2); r < 30; r++ {
			feeds[i].broadcast(frameOf(r, 20_000))
		}
	}
	h.room().trim() // which comes by itself, a little later
	if n := h.room().held.Load(); n > 3<<20+100*(keptRecent+20_000) {
		t.Errorf("%d bytes are kept for clients that do not read", n)
	}
}
