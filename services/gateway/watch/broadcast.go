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

// watchBroadcast is one stream from the watch tier and the clients that share it.
type watchBroadcast struct {
	hub   *Hub
	key   key
	query *watchfanoutv1.Query
	// storageResource is the query's stored resource.
	storageResource string
	// owner is the user of the client that the feed began with.
	owner string
	// served says whether it is served still.
	served func() bool
	cancel context.CancelFunc

	mu sync.Mutex
	// entries are the recent events.
	entries events.Ring[entry]
	bytes   int
	// Everything after low is in entries. The feed has come to high.
	low, high events.Position
	// bookmark is the newest one: everything up to it has been in entries.
	bookmark entry
	// bookmarkCount counts them.
	bookmarkCount int64
	receivers     []*receiver
	ended         bool
	idleTimer     *time.Timer
}

type entry struct {
	data     []byte
	position events.Position
}

// receiver is one client of a feed. All its fields belong to the feed's lock.
type receiver struct {
	broadcast *watchBroadcast
	cursor    int64
	position  events.Position
	// limiter is what its events cost; nil: nothing.
	limiter *limiter
	// stream is set where events may be written without the client's own goroutine.
	stream *h2writer.Stream
	// synced: the client has seen everything, so the next event is written to stream as it comes.
	synced bool
	// blocked: there was no room on its connection, or nothing left of its user's budget. What comes meanwhile it is sent
	// with the rest, when it is let return. listed: it will be.
	blocked, queued bool
	// throttled: it has waited for the budget since it had last seen everything.
	throttled bool
	// charged: the entries before this have been taken from the budget, and its own goroutine is to write them.
	charged int64
	// wake tells the client's own goroutine that it has something to do.
	wake           chan struct{}
	allowBookmarks bool
	// bookmarkPeriod is how often it gets one.
	bookmarkPeriod time.Duration
	// lastBookmark is which bookmark of the feed's it was sent last.
	lastBookmark int64
	// nextBookmarkTime is when the next bookmark is; zero for none.
	nextBookmarkTime time.Time
	// skipUntil: events up to here were sent before.
	skipUntil events.Position
}

// join adds a client; nil where what it needs next is gone, or the feed has ended.
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

// releaseEntries lets go of the entries of a feed that has ended, once nobody reads them any more.
func (b *watchBroadcast) releaseEntries() {
	if b.ended && len(b.receivers) == 0 {
		b.entries = events.Ring[entry]{}
	}
}

// isBehind says whether a position is further than the feed has come.
func (b *watchBroadcast) isBehind(position events.Position) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.high.Revision < position.Revision
}

// leave takes a client off and answers its place.
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
	r.stream = nil // whoever lets it return may do so much later
	b.releaseEntries()
	return r.position
}

// advancePosition makes the place of a client that has seen everything that of the feed.
func (b *watchBroadcast) advancePosition(r *receiver) {
	if r.cursor == b.entries.Next() && r.position.Before(b.high) {
		r.position = b.high
	}
}

var (
	// errUnsynced says that the feed does not hold what comes next: a client has to go on alone for a while.
	errUnsynced = errors.New("behind")
	// errThrottled says the same of a client that was kept waiting for its user's budget: a stream of its own would cost
	// more than what it waited for, so its watch ends.
	errThrottled = errors.New("behind, for its user's budget")
	// errBroadcastEnded says that the feed is over: every client has to find out why by itself.
	errBroadcastEnded = errors.New("the feed has ended")
)

// closeIdle ends a feed that nobody has come back to.
func (b *watchBroadcast) closeIdle() {
	b.mu.Lock()
	unused := len(b.receivers) == 0
	b.ended = b.ended || unused
	b.mu.Unlock()
	if unused {
		b.hub.drop(b)
	}
}

// next is what comes next for a client: events, or a bookmark that is due. Where there is nothing, events are from now
// on written to its stream as they come, if it has one.
func (b *watchBroadcast) next(r *receiver) ([][]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nextLocked(r)
}

// nextLocked is next, with the lock held.
func (b *watchBroadcast) nextLocked(r *receiver) ([][]byte, error) {
	// until it has seen everything; what this answers is written by the client's own goroutine
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

// pendingEvents is what comes next for a client, at most so many entries and about so many bytes, and its place after them.
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
		) { // else it was sent before the client came, which may be further than the feed had come
			parts, position = append(parts, e.data), e.position
			bytes -= len(e.data)
		}
	}
	return parts, cursor, position
}

// unsyncedReason is why a client cannot go on with the feed that does not hold what comes next for it.
func (r *receiver) unsyncedReason() error {
	if r.throttled {
		return errThrottled
	}
	return errUnsynced
}

// waitForLimiter has the client return when something is left of its user's budget.
func (r *receiver) waitForLimiter() {
	r.synced, r.blocked, r.throttled = false, true, true
	if !r.queued {
		r.queued = true
		r.limiter.enqueueWaiter(r)
	}
}

// waitForQueue has the client return when its connection's queue has room.
func (r *receiver) waitForQueue() {
	r.synced, r.blocked = false, true
	if !r.queued {
		r.queued = true
		r.stream.EnqueueWaiter(r)
	}
}

// bookmarkDue says whether a client that has seen every event is due the newest bookmark.
func (b *watchBroadcast) bookmarkDue(r *receiver, now time.Time) bool {
	return r.allowBookmarks && r.lastBookmark < b.bookmarkCount && !now.Before(r.nextBookmarkTime) &&
		!b.bookmark.position.Before(r.position) &&
		!b.bookmark.position.Before(r.skipUntil)
}

// bookmarkSent notes that the newest bookmark was sent.
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

// dispatch takes what came from the watch tier and writes it to everyone who has seen all before it.
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
			continue // the stream took over from another, which had sent it
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

// entryBytes is what an entry takes beside its data.
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
		case r.blocked: // it comes for them
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

// tryWrite gives parts to a client that has seen everything before. One whose user's budget is spent, or whose connection
// has no room now, comes later, and one that takes no more itself is its own goroutine's to wait for. end is the place
// after the parts.
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

// unblockBytes is about how many bytes a client is offered at once when there is room again: others wait as well.
const unblockBytes = 64 << 10

// Unblock implements wire.Returner: it offers what has come meanwhile.
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

// sendBookmarks gives the newest bookmark to those who are due one.
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

// flush writes what was offered: one write for each connection.
func (b *watchBroadcast) flush() {
	for _, r := range b.receivers {
		if r.synced {
			r.stream.Flush()
		}
	}
}

// wake makes the client's own goroutine go on.
func (b *watchBroadcast) wake(r *receiver) {
	r.synced, r.blocked = false, false
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// retainedBytes is what a feed keeps of events that every client of it has seen, for those who come to join it; it may
// keep twice as much until it looks again who has seen what.
const retainedBytes = 64 << 10

// account accounts for bytes that the feed begins or, below 0, ceases to keep.
func (b *watchBroadcast) account(n int) {
	b.hub.quota().account(b.bytes, n)
	b.bytes += n
}

// trim drops the oldest entries: those that every client has seen, beyond retainedBytes bytes, and any beyond BroadcastBytes
// or, where all feeds together keep more than BroadcastTotalBytes, beyond the feed's share. A client that still needs one goes
// on with a stream of its own.
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

// end lets every client go on alone.
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

// run follows the watch tier until the feed is closed or the stream ends in a way that every client must see for
// itself.
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

// watchReplicas receives from one replica after the other, each of which takes over from the one before while that still
// sends, until one breaks off.
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

// receive broadcasts what a replica sends, until it breaks off.
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
