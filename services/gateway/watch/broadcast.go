package watch

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/telemetry"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// watchBroadcast is a stream from the watch tier that equal watches share. Its goroutine executes run. It ends when
// cancel is called or the stream cannot resume. Reassignments run on their own goroutines.
type watchBroadcast struct {
	hub   *Hub
	key   key
	query *watchfanoutv1.Query
	// storageResource is the resource that the query's objects are stored as. It selects the replica.
	storageResource string
	// owner is the quota owner of the watches.
	owner string
	// served reports whether discovery still has the resource.
	served func() bool
	cancel context.CancelFunc

	mu sync.Mutex
	// entries is a ring of the recent events.
	entries events.Ring[entry]
	bytes   int
	// entries holds every event after low. high is the position that the stream has reached.
	low, high events.Position
	// bookmark is the newest bookmark. Every event before it is or was in entries.
	bookmark entry
	// bookmarkCount counts the bookmarks received.
	bookmarkCount int64
	receivers     []*receiver
	ended         bool
	idleTimer     *time.Timer
}

type entry struct {
	data     []byte
	position events.Position
}

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

// join adds a receiver at a position. It returns nil if the broadcast has ended or has dropped the next event of the
// position.
func (b *watchBroadcast) join(position events.Position) *receiver {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended || position.Before(b.low) || position.DifferentEpoch(b.high) {
		return nil
	}
	next := b.entries.Search(func(e entry) bool { return position.Before(e.position) })
	r := &receiver{
		broadcast: b,
		cursor:    next,
		position:  position,
		skipUntil: position,
		wake:      make(chan struct{}, 1),
	}
	b.receivers = append(b.receivers, r)
	if b.idleTimer != nil {
		b.idleTimer.Stop()
		b.idleTimer = nil
	}
	receivers.Inc()
	return r
}

// releaseEntries frees the entries of an ended broadcast after its last receiver has left. The lock is held.
func (b *watchBroadcast) releaseEntries() {
	if b.ended && len(b.receivers) == 0 {
		b.entries = events.Ring[entry]{}
	}
}

// isBehind reports whether the broadcast has not reached position.
func (b *watchBroadcast) isBehind(position events.Position) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.high.Revision < position.Revision
}

// leave removes a receiver and returns its position.
func (b *watchBroadcast) leave(r *receiver) events.Position {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.receivers, r); i >= 0 {
		last := len(b.receivers) - 1
		b.receivers[i] = b.receivers[last]
		b.receivers[last] = nil
		b.receivers = b.receivers[:last]
		receivers.Dec()
	}
	if len(b.receivers) == 0 && !b.ended {
		b.idleTimer = time.AfterFunc(idleTimeout, b.closeIdle)
	}
	r.synced, r.blocked = false, false
	b.advancePosition(r)
	r.stream = nil // the limiter or the connection may hold the receiver for much longer
	b.releaseEntries()
	return r.position
}

// advancePosition sets the position of a receiver without pending entries to the broadcast's.
func (b *watchBroadcast) advancePosition(r *receiver) {
	if r.cursor == b.entries.Next() && r.position.Before(b.high) {
		r.position = b.high
	}
}

var (
	// errUnsynced: the broadcast does not hold the receiver's next event. The watch opens its own stream until it has
	// caught up.
	errUnsynced = errors.New("unsynced")
	// errThrottled is errUnsynced for a throttled receiver. Its watch ends, because a stream of its own would cost more
	// than the events it waited for.
	errThrottled = errors.New("throttled: over --max-watch-rate-per-user")
	// errBroadcastEnded: the broadcast has ended. Each watch opens its own stream, which returns the reason to its
	// client.
	errBroadcastEnded = errors.New("the watch broadcast has ended")
)

// closeIdle ends a broadcast that has had no receiver for idleTimeout.
func (b *watchBroadcast) closeIdle() {
	b.mu.Lock()
	unused := len(b.receivers) == 0
	b.ended = b.ended || unused
	b.mu.Unlock()
	if unused {
		b.hub.drop(b)
	}
}

// next returns the pending entries of a receiver, or a due bookmark, for the client's goroutine to write. If it returns
// nothing and the receiver has a stream, the receiver is synced: dispatch writes later events to the stream.
func (b *watchBroadcast) next(r *receiver) ([][]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nextLocked(r)
}

// nextLocked is next with the lock held.
func (b *watchBroadcast) nextLocked(r *receiver) ([][]byte, error) {
	// the receiver stays active unless nothing is pending: the caller writes the result
	r.synced, r.blocked = false, false
	if r.cursor < b.entries.Base() {
		return nil, r.unsyncedReason()
	}
	limit := math.MaxInt
	if r.charged > r.cursor {
		limit = int(r.charged - r.cursor)
	}
	parts, cursor, position := b.pendingEvents(r, limit, math.MaxInt)
	if r.charged <= r.cursor && len(parts) > 0 && !r.limiter.tryAcquire(time.Now(), partsCost(parts)) {
		r.waitForLimiter()
		return nil, nil
	}
	r.cursor, r.position = cursor, position
	delivered.Add(float64(len(parts)))
	if r.cursor < b.entries.Next() {
		if len(parts) == 0 {
			return b.nextLocked(r)
		}
		return parts, nil
	}
	r.throttled = false
	if now := time.Now(); b.bookmarkDue(r, now) {
		parts = append(parts, b.bookmark.data)
		b.bookmarkSent(r, now.Add(r.bookmarkPeriod))
	}
	if len(parts) > 0 {
		return parts, nil
	}
	b.advancePosition(r)
	if b.ended {
		return nil, errBroadcastEnded
	}
	r.synced = r.stream != nil
	return nil, nil
}

// pendingEvents returns the data of a receiver's next entries, and its cursor and position after them. It returns at
// most `entries` entries, and stops after about `bytes` bytes.
func (b *watchBroadcast) pendingEvents(
	r *receiver,
	entries, bytes int,
) (parts [][]byte, cursor int64, position events.Position) {
	cursor, position = r.cursor, r.position
	for i, e := range b.entries.From(r.cursor) {
		if i >= entries || bytes <= 0 {
			break
		}
		cursor++
		if r.skipUntil.Before(
			e.position,
		) { // the client already has other entries: it may have joined at a position past high
			parts, position = append(parts, e.data), e.position
			bytes -= len(e.data)
		}
	}
	return parts, cursor, position
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

// retainedBytes is how many bytes of entries that all receivers have seen a broadcast retains, for watches that join
// later. trim runs at twice this size.
const retainedBytes = 64 << 10

// account adds n bytes to the size of the ring. n is negative for dropped entries.
func (b *watchBroadcast) account(n int) {
	b.hub.quota().account(b.bytes, n)
	b.bytes += n
}

// trim drops the oldest entries until the ring is within its limits. Entries that all receivers have seen are limited
// to retainedBytes. All entries are limited to BroadcastBytes, and to the broadcast's share if all broadcasts exceed
// BroadcastTotalBytes. A receiver that still needs a dropped entry becomes unsynced.
func (b *watchBroadcast) trim() {
	limit, retained := b.hub.quota().share(b.hub.Config.BroadcastTotalBytes)
	limit = min(limit, b.hub.Config.BroadcastBytes)
	overLimit := func() bool { return b.bytes > limit }
	if b.bytes <= 2*retained && !overLimit() {
		return
	}
	slowest := b.entries.Next()
	for _, r := range b.receivers {
		slowest = min(slowest, r.cursor)
	}
	sequence := b.entries.Base()
	b.entries.DropWhile(func(e entry) bool {
		seen := sequence < slowest
		if !overLimit() && (!seen || b.bytes <= retained) {
			return false
		}
		b.account(-len(e.data) - entryBytes)
		b.low = e.position
		sequence++
		return true
	})
}

// end ends the broadcast. Its receivers become active. Each sends its pending entries and then opens its own stream.
func (b *watchBroadcast) end() {
	b.mu.Lock()
	b.ended = true
	b.account(-b.bytes)
	b.hub.quota().leave(b)
	for _, r := range b.receivers {
		b.wake(r)
	}
	b.releaseEntries()
	b.mu.Unlock()
	b.hub.drop(b)
}

// run receives from the watch tier until ctx is done. After Unavailable it resumes, for up to resumeTimeout. Other
// errors end the broadcast, because each client must see them on its own stream.
func (b *watchBroadcast) run(ctx context.Context) {
	defer b.end()
	r := &watchfanoutv1.WatchRequest{
		Query:             b.query,
		AllowBookmarks:    true,
		SendInitialEvents: new(bool),
		ColumnsSent:       true,
		InitialEventsDone: true,
		Owner:             b.owner,
	}
	var unavailableSince time.Time
	for {
		err := b.watchReplicas(ctx, r, func() { unavailableSince = time.Time{} })
		if ctx.Err() != nil || status.Code(err) != codes.Unavailable || !b.served() {
			return
		}
		if unavailableSince.IsZero() {
			unavailableSince = time.Now()
			resumes.Inc()
		} else if time.Since(unavailableSince) > resumeTimeout {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryDelay(unavailableSince)):
		}
	}
}

// watchReplicas receives from a replica, and from each successor that replaces it, until a stream breaks.
func (b *watchBroadcast) watchReplicas(ctx context.Context, r *watchfanoutv1.WatchRequest, onFrame func()) error {
	s, err := b.openReplica(ctx, r)
	for err == nil {
		err = b.receive(s, onFrame)
		s.cancel()
		if next := s.successor(); next != nil {
			s, err = next, nil
		}
	}
	return err
}

// receive dispatches a replica's frames until its stream ends.
func (b *watchBroadcast) receive(s *replicaStream, onFrame func()) (err error) {
	m := s.firstFrame
	for {
		if m == nil {
			if m, err = s.Recv(); err != nil {
				return err
			}
		}
		if m.End {
			return io.EOF
		}
		onFrame()
		b.dispatch(m)
		m = nil
	}
}
