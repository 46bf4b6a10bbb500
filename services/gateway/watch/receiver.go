package watch

import (
	"math"
	"time"

	"watershed.dev/platform/events"
	"watershed.dev/services/gateway/h2writer"
)

// receiver is a client's part in a broadcast. broadcast.mu guards all its fields.
//
// States, as synced and blocked encode them:
//
//	                +---------- wake ----------+
//	                v                          |
//	join ------> active --- all sent ----> synced
//	             |  ^ |                      ^ |
//	             |  | +-- no tokens --+      | |
//	             |  |                 v      | |
//	             |  +---- wake ---- blocked -+ |
//	             v                       ^-----+
//	          unsynced
//
// The states:
//
//   - active (neither flag): the client's own goroutine calls next and writes the result. It waits for wake if the
//     result is empty. A receiver without a stream (HTTP/1.1) is never synced.
//   - synced: the client has received every entry. dispatch writes the next event to stream, from the broadcast's
//     goroutine.
//   - blocked: the owner's limiter has no tokens, or the connection's queue is full. dispatch skips the receiver. The
//     limiter or the connection calls Unblock later; queued is set until then.
//   - unsynced: the ring has dropped an entry that the receiver needs. The receiver is no longer part of the broadcast:
//     runJoined leaves it, and runUnsynced opens a stream.
//
// Transitions:
//
//   - active to synced: next finds no entry and no due bookmark.
//   - active to blocked: next finds no tokens (throttled is set).
//   - active to unsynced: next finds the cursor below the ring's base, or the broadcast ended and all its entries sent.
//     In the first case, a throttled receiver's watch ends instead.
//   - synced to blocked: tryWrite finds no tokens (throttled is set) or a full queue.
//   - synced to active: the stream's window is full, other entries are pending, or the broadcast ends.
//   - blocked to synced: Unblock has queued every entry. throttled is reset.
//   - blocked to blocked: Unblock has queued unblockBytes and more entries follow, or it finds no tokens or a full
//     queue again.
//   - blocked to active: Unblock finds the entries dropped, the broadcast ended, no stream, a full window or a due
//     bookmark.
//   - any to active: the client's goroutine calls next or bookmarkNow.
//
// Lock order: Hub.mu, then watchBroadcast.mu, then a single lock of these: limiter.mu, h2writer.Conn's, MemoryQuota.mu.
// RateLimiter.mu comes before limiter.mu. Hub.mu comes before sharedInitialEvents.mu. InflightQuota.mu is taken with no
// other lock held. The limiter, the connection and MemoryQuota.trim release their lock before they call back into a
// broadcast.
type receiver struct {
	broadcast *watchBroadcast
	cursor    int64
	position  events.Position
	// limiter is charged for the receiver's events. Nil has no limit.
	limiter *limiter
	// stream is set if other goroutines may write to the client.
	stream *h2writer.Stream
	// synced: the client has received every entry, so dispatch writes the next event to stream.
	synced bool
	// blocked: dispatch skips the receiver until Unblock, which sends the pending entries together. queued: the limiter
	// or the connection will call Unblock.
	blocked, queued bool
	// throttled: the receiver has waited for limiter since it was last synced.
	throttled bool
	// charged: the limiter is already charged for entries before this sequence number, which the client's goroutine
	// writes.
	charged int64
	// wake makes the client's goroutine call next. Its capacity is 1.
	wake           chan struct{}
	allowBookmarks bool
	// bookmarkPeriod is the minimum time between two bookmarks.
	bookmarkPeriod time.Duration
	// lastBookmark is the bookmarkCount of the last bookmark sent.
	lastBookmark int64
	// nextBookmarkTime is when the next bookmark is due. Zero: now.
	nextBookmarkTime time.Time
	// skipUntil: the client already has events up to this position.
	skipUntil events.Position
}

// unsyncedReason returns the error of a receiver whose next entry was dropped.
func (r *receiver) unsyncedReason() error {
	if r.throttled {
		return errThrottled
	}
	return errUnsynced
}

// waitForLimiter blocks the receiver until the limiter calls Unblock.
func (r *receiver) waitForLimiter() {
	r.synced, r.blocked, r.throttled = false, true, true
	if !r.queued {
		r.queued = true
		r.limiter.enqueueWaiter(r)
	}
}

// waitForQueue blocks the receiver until its connection calls Unblock, when the queue has space.
func (r *receiver) waitForQueue() {
	r.synced, r.blocked = false, true
	if !r.queued {
		r.queued = true
		r.stream.EnqueueWaiter(r)
	}
}

// unblockBytes is about how many bytes Unblock queues at once, because other receivers wait too.
const unblockBytes = 64 << 10

// Unblock implements h2writer.Waiter: it queues the pending entries of a blocked receiver.
func (r *receiver) Unblock() {
	b := r.broadcast
	b.mu.Lock()
	defer b.mu.Unlock()
	r.queued = false
	if !r.blocked {
		return
	}
	r.blocked = false
	if r.cursor < b.entries.Base() {
		b.wake(r)
		return
	}
	parts, cursor, position := b.pendingEvents(r, math.MaxInt, unblockBytes)
	now := time.Now()
	if b.ended || r.stream == nil {
		if r.limiter.tryAcquire(now, partsCost(parts)) {
			r.charged = cursor
			b.wake(r)
		} else {
			r.waitForLimiter()
		}
		return
	}
	if len(parts) > 0 && !b.tryWrite(r, now, partsCost(parts), cursor, parts...) {
		return
	}
	r.stream.Flush()
	r.cursor, r.position = cursor, position
	delivered.Add(float64(len(parts)))
	switch {
	case r.cursor < b.entries.Next():
		r.waitForQueue()
	case b.bookmarkDue(r, now):
		r.throttled = false
		b.wake(r)
	default:
		r.synced, r.throttled = true, false
	}
}
