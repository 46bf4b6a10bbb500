package watch

import (
	"time"

	"watershed.dev/platform/watchcache/core"
	"watershed.dev/services/gateway/h2writer"
)

// receiver is a client's part in a broadcast. broadcast.mu guards all its fields. core.Receiver documents its states.
//
//   - active: runJoined calls next and writes the result. It waits for wake if the result is empty.
//   - synced: dispatch writes the next event to stream, from the broadcast's goroutine.
//   - blocked: dispatch skips the receiver. The limiter or the connection calls Unblock later.
//   - unsynced: runJoined leaves the broadcast, and runUnsynced opens a stream.
//
// Lock order: Hub.mu, then watchBroadcast.mu, then a single lock of these: limiter.mu, h2writer.Conn's, MemoryQuota.mu.
// RateLimiter.mu comes before limiter.mu. Hub.mu comes before sharedInitialEvents.mu. InflightQuota.mu is taken with no
// other lock held. The limiter, the connection and MemoryQuota.trim release their lock before they call back into a
// broadcast.
type receiver struct {
	core.Receiver
	broadcast *watchBroadcast
	// limiter is charged for the receiver's events. Nil has no limit.
	limiter *limiter
	// stream is set if other goroutines may write to the client.
	stream *h2writer.Stream
	// gzip is the gzip body of the watch. Nil: the response is plain.
	gzip *gzipBody
	// start is sentTo when the receiver joined, or when its usage last counted it.
	start int64
	// watch is the client's. Its wake makes its goroutine call next.
	watch *clientWatch
}

// waitForLimiter blocks the receiver until the limiter calls Unblock.
func (r *receiver) waitForLimiter() {
	if r.Block(true) {
		r.limiter.enqueueWaiter(r)
	}
}

// waitForQueue blocks the receiver until its connection calls Unblock, when the queue has space.
func (r *receiver) waitForQueue() {
	if r.Block(false) {
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
	pending, action := b.Unblock(&r.Receiver, unblockBytes)
	now := time.Now()
	if action == core.Write && r.gzip != nil { // the watch's goroutine compresses them
		action = core.Wake
	}
	switch action {
	case core.Wake:
		b.wake(r)
	case core.Charge:
		if r.limiter.tryAcquire(now, partsCost(pending.Parts)) {
			r.Charged(pending.End)
			b.wake(r)
		} else {
			r.waitForLimiter()
		}
	case core.Write:
		if len(pending.Parts) > 0 && !b.tryWrite(r, now, partsCost(pending.Parts), pending.End, pending.Parts...) {
			return
		}
		r.stream.Flush()
		delivered.Add(float64(len(pending.Parts)))
		b.sent(1, pending.Parts...)
		switch b.Written(&r.Receiver, pending, now) {
		case core.Enqueue:
			r.waitForQueue()
		case core.Wake:
			b.wake(r)
		}
	}
}
