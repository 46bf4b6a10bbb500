package watch

import (
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
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
