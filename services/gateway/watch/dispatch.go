package watch

import (
	"cmp"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"watershed.dev/platform/events"
	"watershed.dev/platform/telemetry"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// bookmarkDue reports whether a receiver without pending entries is due the newest bookmark.
func (b *watchBroadcast) bookmarkDue(r *receiver, now time.Time) bool {
	return r.allowBookmarks && r.lastBookmark < b.bookmarkCount && !now.Before(r.nextBookmarkTime) &&
		!b.bookmark.position.Before(r.position) &&
		!b.bookmark.position.Before(r.skipUntil)
}

// bookmarkSent records that the receiver was sent the newest bookmark. next is when the following bookmark is due.
func (b *watchBroadcast) bookmarkSent(r *receiver, next time.Time) {
	r.position, r.skipUntil = b.bookmark.position, b.bookmark.position
	r.nextBookmarkTime, r.lastBookmark = next, b.bookmarkCount
}

// bookmarkNow makes a bookmark due now.
func (b *watchBroadcast) bookmarkNow(r *receiver) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r.nextBookmarkTime, r.synced, r.blocked = time.Time{}, false, false
}

// dispatch adds a frame's events to the ring and writes them to the synced receivers.
func (b *watchBroadcast) dispatch(m *watchfanoutv1.WatchFrame) {
	start := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	firstNew := b.entries.Next()
	var traces []string
	offset := int32(0)
	bookmarkReceived := false
	for _, boundary := range m.Boundaries {
		e := entry{m.Data[offset:boundary.End], events.FromProto(boundary.Position)}
		offset = boundary.End
		if e.position.Before(b.high) || !boundary.Bookmark && !b.high.Before(e.position) {
			continue // the stream replaced another, which had sent this event
		}
		if boundary.Bookmark {
			b.bookmark, bookmarkReceived = e, true
			b.bookmarkCount++
			continue
		}
		b.entries.Add(e)
		b.account(len(e.data) + entryBytes)
		if boundary.Traceparent != "" {
			traces = append(traces, boundary.Traceparent)
		}
	}
	if p := events.FromProto(m.Position); !p.Before(b.high) {
		p.Epoch = cmp.Or(p.Epoch, b.high.Epoch)
		b.high = p
	}
	added := b.entries.From(firstNew)
	if len(added) > 0 {
		b.deliver(added)
	}
	if bookmarkReceived {
		b.sendBookmarks(time.Now())
	}
	b.trim()
	for _, trace := range traces {
		telemetry.RecordEventSpan(trace, "deliver", start, attribute.Int("watches", len(b.receivers)))
	}
}

// entryBytes is the size of an entry without its data.
const entryBytes = 48

func (b *watchBroadcast) deliver(added []entry) {
	end := b.entries.Next()
	parts := make([][]byte, len(added))
	for i, e := range added {
		parts[i] = e.data
	}
	last := added[len(added)-1].position
	n, cost, now := 0, partsCost(parts), time.Now()
	for _, r := range b.receivers {
		switch {
		case r.blocked: // Unblock sends them
		case r.synced && r.cursor == end-int64(len(added)) && r.skipUntil.Before(added[0].position):
			if b.tryWrite(r, now, cost, end, parts...) {
				r.cursor, r.position = end, last
				n++
			}
		default:
			b.wake(r)
		}
	}
	delivered.Add(float64(n * len(added)))
	b.flush()
}

func partsCost(parts [][]byte) float64 {
	bytes := 0
	for _, p := range parts {
		bytes += len(p)
	}
	return eventCost(len(parts), bytes)
}

// tryWrite queues parts for a receiver that has all entries before them. It reports whether they are queued; end is the
// cursor after them. Without tokens or space in the connection's queue, the receiver becomes blocked. If its stream's
// window is full, it becomes active, and its goroutine waits for the window.
func (b *watchBroadcast) tryWrite(r *receiver, now time.Time, cost float64, end int64, parts ...[]byte) bool {
	if !r.limiter.tryAcquire(now, cost) {
		r.waitForLimiter()
		return false
	}
	accepted, queueFull := r.stream.TryWrite(parts...)
	if accepted {
		return true
	}
	if queueFull {
		r.limiter.charge(-cost)
		r.waitForQueue()
	} else {
		r.charged = end
		b.wake(r)
	}
	return false
}

// sendBookmarks sends the newest bookmark to the receivers that are due a bookmark.
func (b *watchBroadcast) sendBookmarks(now time.Time) {
	for _, r := range b.receivers {
		switch {
		case r.blocked || !b.bookmarkDue(r, now):
		case !r.synced:
			b.wake(r)
		case b.tryWrite(r, now, 0, r.cursor, b.bookmark.data):
			b.bookmarkSent(r, now.Add(r.bookmarkPeriod))
		}
	}
	b.flush()
}

// flush flushes the streams of synced receivers. A connection writes the events of all its streams at once.
func (b *watchBroadcast) flush() {
	for _, r := range b.receivers {
		if r.synced {
			r.stream.Flush()
		}
	}
}

// wake makes a receiver active and its goroutine call next.
func (b *watchBroadcast) wake(r *receiver) {
	r.synced, r.blocked = false, false
	select {
	case r.wake <- struct{}{}:
	default:
	}
}
