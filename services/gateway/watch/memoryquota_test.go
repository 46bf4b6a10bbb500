package watch

import (
	"testing"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// newTestBroadcast returns a broadcast without a stream.
func newTestBroadcast(h *Hub) *watchBroadcast {
	b := &watchBroadcast{
		hub:       h,
		Broadcast: core.NewBroadcast(events.Position{Revision: 1}),
		cancel:    func() {},
	}
	h.MemoryQuota.enter(b)
	return b
}

// size returns how many bytes the broadcast holds.
func (b *watchBroadcast) size() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Bytes
}

// newTestFrame returns a frame with an event of n bytes.
func newTestFrame(revision int64, n int) *watchfanoutv1.WatchFrame {
	return &watchfanoutv1.WatchFrame{
		Data:     make([]byte, n),
		Position: &watchfanoutv1.Position{Revision: revision},
		Boundaries: []*watchfanoutv1.EventBoundary{
			{End: int32(n), Position: &watchfanoutv1.Position{Revision: revision}},
		},
	}
}

// When the quota is exceeded, large broadcasts share it equally, and small broadcasts are not trimmed.
func TestBroadcastsShareMemoryQuota(t *testing.T) {
	const bound = 10 << 20
	h := hub(newTier())
	h.Config.BroadcastBytes, h.Config.BroadcastTotalBytes = 4<<20, bound
	behind := func(events int64) *watchBroadcast {
		b := newTestBroadcast(h)
		b.join(nil, b.High) // its receiver never reads
		for r := range events {
			b.dispatch(newTestFrame(2+r, 10_000))
		}
		return b
	}
	quiet := behind(15)
	retained := quiet.size()
	for range 3 {
		behind(1000) // together they use the whole quota
	}
	for range 40 {
		behind(40)
	}
	quiet.dispatch(newTestFrame(100, 10_000))
	if n := quiet.size(); n < retained {
		t.Errorf("a small broadcast held %d bytes and now holds %d", retained, n)
	}
	h.MemoryQuota.trim()
	if n := h.MemoryQuota.used.Load(); n > bound {
		t.Errorf("all broadcasts hold %d bytes", n)
	}
	for range 300 { // these hold little
		b := behind(1)
		b.leave(b.receivers[0])
	}
	h.MemoryQuota.trim()
	if n := quiet.size(); n < retained {
		t.Errorf("a small broadcast held %d bytes and now holds %d", retained, n)
	}
}

// A broadcast holds few events that all receivers have seen, and all broadcasts stay within the quota (F5, S13).
func TestBroadcastsTrimSeenEvents(t *testing.T) {
	h := hub(newTier())
	h.Config.BroadcastBytes, h.Config.BroadcastTotalBytes = 4<<20, 3<<20
	var broadcasts []*watchBroadcast
	for range 100 {
		broadcasts = append(broadcasts, newTestBroadcast(h))
	}
	for _, b := range broadcasts {
		s := b.join(nil, events.Position{Revision: 1})
		for r := int64(2); r < 60; r++ {
			b.dispatch(newTestFrame(r, 20_000))
			if _, err := b.next(s); err != nil {
				t.Fatal(err)
			}
		}
		if n := b.size(); n > 2*retainedBytes+40_000 {
			t.Fatalf("a broadcast whose receivers have seen everything holds %d bytes", n)
		}
		b.leave(s)
		b.end()
	}
	if n := h.MemoryQuota.used.Load(); n != 0 {
		t.Errorf("%d bytes are accounted to ended broadcasts", n)
	}
	for i := range broadcasts {
		broadcasts[i] = newTestBroadcast(h)
		broadcasts[i].join(nil, events.Position{Revision: 1}) // its receiver never reads
		for r := int64(2); r < 30; r++ {
			broadcasts[i].dispatch(newTestFrame(r, 20_000))
		}
	}
	h.MemoryQuota.trim() // it also runs by itself, after trimAllDelay
	if n := h.MemoryQuota.used.Load(); n > 3<<20+100*(retainedBytes+20_000) {
		t.Errorf("%d bytes are held for clients that do not read", n)
	}
}
