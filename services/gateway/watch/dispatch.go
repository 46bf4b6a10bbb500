package watch

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// bookmarkNow makes a bookmark due now.
func (b *watchBroadcast) bookmarkNow(r *receiver) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r.BookmarkNow()
}

// dispatch adds a frame's events to the ring and writes them to the synced receivers.
func (b *watchBroadcast) dispatch(m *watchfanoutv1.WatchFrame) {
	start := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if start.Sub(b.events.resolved) > eventMetricsTimeout {
		b.events = newEventMetrics(b.query)
	}
	before := b.Bytes
	d := b.Add(m)
	b.account(before)
	b.added += int64(b.Bytes - before - core.EntryBytes*len(d.Parts))
	if len(d.Parts) > 0 {
		b.deliver(&d, b.compress(d.Parts))
	}
	if d.Bookmark {
		b.sendBookmarks(time.Now())
	}
	b.trim()
	for _, trace := range d.Traces {
		telemetry.RecordEventSpan(trace, "deliver", start, attribute.Int("watches", len(b.receivers)))
	}
}

// compress returns new entries as a part of the receivers' gzip bodies, or nil if no receiver has such a body. It
// releases the lock meanwhile: a receiver that takes the entries before it has the lock again does not get them twice
// (core.Broadcast.Offer).
func (b *watchBroadcast) compress(parts [][]byte) *deflate.Part {
	if b.compressed == 0 {
		return nil
	}
	b.mu.Unlock()
	defer b.mu.Lock()
	part, err := deflate.Compress(parts...)
	if err != nil { // each watch then compresses the entries, and fails
		return nil
	}
	return part
}

// deliver writes new entries to the synced receivers. part is the compressed entries, for receivers with a gzip body.
func (b *watchBroadcast) deliver(d *core.Delivery, part *deflate.Part) {
	n, cost, now := 0, partsCost(d.Parts), time.Now()
	for _, r := range b.receivers {
		switch b.Offer(&r.Receiver, d) {
		case core.Wake:
			b.wake(r)
		case core.Write:
			if b.offer(r, now, cost, d.End, d.Parts, part) {
				b.Delivered(&r.Receiver, d)
				n++
			}
		}
	}
	delivered.Add(float64(n * len(d.Parts)))
	b.events.sent(n, d.Parts...)
	b.flush()
}

// offer is tryWrite for a plain body, or the same for a gzip body, with part.
func (b *watchBroadcast) offer(r *receiver, now time.Time, cost float64, end int64, plain [][]byte,
	part *deflate.Part) bool {
	if r.gzip == nil {
		return b.tryWrite(r, now, cost, end, plain...)
	}
	if part == nil {
		b.wake(r)
		return false
	}
	accepted := b.tryWrite(r, now, cost, end, part.Data)
	if accepted {
		r.gzip.Add(part)
	}
	return accepted
}

func partsCost(parts [][]byte) float64 {
	bytes := 0
	for _, p := range parts {
		bytes += len(p)
	}
	return core.EventCost(len(parts), bytes)
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
		r.Charged(end)
		b.wake(r)
	}
	return false
}

// sendBookmarks sends the newest bookmark to the receivers that are due a bookmark.
func (b *watchBroadcast) sendBookmarks(now time.Time) {
	bookmark := [][]byte{b.Bookmark.Data}
	part := b.compress(bookmark)
	for _, r := range b.receivers {
		switch b.OfferBookmark(&r.Receiver, now) {
		case core.Wake:
			b.wake(r)
		case core.Write:
			if b.offer(r, now, 0, r.Cursor, bookmark, part) {
				b.BookmarkSent(&r.Receiver, now)
				b.events.sent(1, bookmark...)
			}
		}
	}
	b.flush()
}

// flush flushes the streams of synced receivers. A connection writes the events of all its streams at once.
func (b *watchBroadcast) flush() {
	for _, r := range b.receivers {
		if r.State == core.Synced {
			r.stream.Flush()
		}
	}
}

// wake makes a receiver active and its goroutine call next.
func (b *watchBroadcast) wake(r *receiver) {
	r.State = core.Active
	if r.watch != nil { // it has not left
		r.watch.wake()
	}
}
