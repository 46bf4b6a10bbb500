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
	before := b.Bytes
	d := b.Add(m)
	b.account(before)
	b.added += int64(b.Bytes - before - core.EntryBytes*len(d.Parts))
	if len(d.Parts) > 0 {
		b.deliver(&d)
	}
	if d.Bookmark {
		b.sendBookmarks(time.Now())
	}
	b.trim(start)
	for _, trace := range d.Traces {
		telemetry.RecordEventSpan(trace, "deliver", start, attribute.Int("watches", len(b.receivers)))
	}
}

// deliver writes new entries to the synced receivers: first the plain entries, and then the compressed.
func (b *watchBroadcast) deliver(d *core.Delivery) {
	n, cost, now, compressed := 0, partsCost(d.Parts), time.Now(), false
	for _, r := range b.receivers {
		switch b.Offer(&r.Receiver, d) {
		case core.Wake:
			b.wake(r)
		case core.Write:
			if r.gzip != nil {
				compressed = true
			} else if b.tryWrite(r, now, cost, d.End, d.Parts...) {
				b.Delivered(&r.Receiver, d)
				n++
			}
		}
	}
	if compressed {
		part := b.compressUnlocked(d.Parts)
		for _, r := range b.receivers {
			if r.gzip == nil || r.State != core.Synced {
				continue
			}
			if b.Offer(&r.Receiver, d) == core.Wake { // it has taken the entries
				b.wake(r)
			} else if b.tryWritePart(r, now, cost, d.End, part) {
				b.Delivered(&r.Receiver, d)
				n++
			}
		}
	}
	delivered.Add(float64(n * len(d.Parts)))
	b.sent(n, d.Parts...)
	b.flush()
}

// compressUnlocked returns entries as a part of gzip bodies. It releases the lock meanwhile: a receiver that takes the
// entries before the lock is held again is not offered them (core.Broadcast.Offer).
func (b *watchBroadcast) compressUnlocked(parts [][]byte) *deflate.Part {
	b.mu.Unlock()
	defer b.mu.Lock()
	return deflate.Compress(parts...)
}

// tryWritePart is tryWrite with a part of a gzip body.
func (b *watchBroadcast) tryWritePart(r *receiver, now time.Time, cost float64, end int64, part *deflate.Part) bool {
	accepted := b.tryWrite(r, now, cost, end, r.gzip.part(part)...)
	if accepted {
		r.gzip.sent(part)
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
	var part *deflate.Part
	for _, r := range b.receivers {
		switch b.OfferBookmark(&r.Receiver, now) {
		case core.Wake:
			b.wake(r)
		case core.Write:
			var sent bool
			if r.gzip == nil {
				sent = b.tryWrite(r, now, 0, r.Cursor, b.Bookmark.Data)
			} else {
				if part == nil { // a bookmark is small, and takes no turn
					part = deflate.Compress(b.Bookmark.Data)
				}
				sent = b.tryWritePart(r, now, 0, r.Cursor, part)
			}
			if sent {
				b.BookmarkSent(&r.Receiver, now)
				b.sent(1, b.Bookmark.Data)
			}
		}
	}
	b.flush()
}

// sent records that a number of receivers were sent events or bookmarks. It resolves the metrics only then, because
// most bookmarks of an idle broadcast are sent to no client. The caller holds b.mu.
func (b *watchBroadcast) sent(receivers int, events ...[]byte) {
	if receivers == 0 || len(events) == 0 {
		return
	}
	if b.events == nil || time.Since(b.events.resolved) > eventMetricsTimeout {
		b.events = newEventMetrics(b.query)
	}
	b.events.sent(receivers, events...)
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
