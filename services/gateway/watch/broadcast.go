package watch

import (
	"context"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// watchBroadcast is a stream from the watch tier that equal watches share. A goroutine executes run while there are
// frames. The broadcast ends when cancel is called or the stream cannot resume. Reassignments run on their own
// goroutines.
type watchBroadcast struct {
	hub   *Hub
	key   key
	query *watchfanoutv1.Query
	// storageResource is the resource that the query's objects are stored as. It selects the replica.
	storageResource string
	// owner is the quota owner of the watches.
	owner  string
	cancel context.CancelFunc

	// The goroutine of run owns these fields. resume runs the broadcast in another goroutine after it was parked.
	resume           func()
	stream           *replicaStream
	unavailableSince time.Time
	// overflowed: the broadcast has a call of Watch, because it was too slow for a shared call.
	overflowed atomic.Bool

	mu sync.Mutex
	core.Broadcast
	receivers []*receiver
	// added is the size of all events so far, and replica the address of the replica that sends replicaStream.
	added         int64
	replica       string
	replicaStream *replicaStream
	idleTimer     *time.Timer
	events        *eventMetrics // nil until sent has resolved them
}

// join adds a receiver at a position. It returns nil if the broadcast has ended or has dropped the next event of the
// position.
func (b *watchBroadcast) join(w *clientWatch, position events.Position) *receiver {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &receiver{broadcast: b, watch: w}
	if !b.Join(&r.Receiver, position) {
		return nil
	}
	r.start = b.sentTo(r)
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
	if b.Ended && len(b.receivers) == 0 {
		b.Release()
	}
}

// isBehind reports whether the broadcast has not reached position.
func (b *watchBroadcast) isBehind(position events.Position) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.High.Revision < position.Revision
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
	if len(b.receivers) == 0 && !b.Ended {
		b.idleTimer = time.AfterFunc(idleTimeout, b.closeIdle)
	}
	if r.watch != nil {
		b.count(r)
	}
	r.stream, r.watch, r.gzip = nil, nil, nil // the limiter or the connection may hold the receiver for much longer
	left := b.Leave(&r.Receiver)
	b.releaseEntries()
	return left
}

// closeIdle ends a broadcast that has had no receiver for idleTimeout.
func (b *watchBroadcast) closeIdle() {
	b.mu.Lock()
	unused := len(b.receivers) == 0
	if unused {
		b.Ended = true
	}
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
	for {
		pending, err := b.Pending(&r.Receiver)
		if err != nil {
			return nil, err
		}
		now := time.Now()
		if !pending.Charged && len(pending.Parts) > 0 && !r.limiter.tryAcquire(now, partsCost(pending.Parts)) {
			r.waitForLimiter()
			return nil, nil
		}
		delivered.Add(float64(len(pending.Parts)))
		parts, again, err := b.Take(&r.Receiver, pending, now)
		b.sent(1, parts...)
		if !again {
			return parts, err
		}
	}
}

// retainedBytes is how many bytes of entries that all receivers have seen a broadcast retains, for watches that join
// later. trim runs at twice this size.
const retainedBytes = 64 << 10

// account updates the quota after the ring, whose size was `before` bytes, has changed.
func (b *watchBroadcast) account(before int) { b.hub.MemoryQuota.account(before, b.Bytes-before) }

// trim drops the oldest entries until the ring is within its limits. Entries that all receivers have seen are limited
// to retainedBytes, and dropped if they are old (core.Broadcast.Trim). All entries are limited to BroadcastBytes, and
// to the broadcast's share if all broadcasts exceed BroadcastTotalBytes. A receiver that still needs a dropped entry
// becomes unsynced.
func (b *watchBroadcast) trim(now time.Time) {
	limit, retained := b.hub.MemoryQuota.share(b.hub.Config.BroadcastTotalBytes)
	limit = min(limit, b.hub.Config.BroadcastBytes)
	if !b.TrimDue(limit, retained, now) {
		return
	}
	slowest := int64(math.MaxInt64)
	for _, r := range b.receivers {
		slowest = min(slowest, r.Cursor)
	}
	before := b.Bytes
	b.Trim(limit, retained, slowest, now)
	b.account(before)
}

// end ends the broadcast. Its receivers become active. Each sends its pending entries and then opens its own stream.
func (b *watchBroadcast) end() {
	b.mu.Lock()
	b.Ended = true
	b.hub.MemoryQuota.account(b.Bytes, -b.Bytes)
	b.hub.MemoryQuota.leave(b)
	for _, r := range b.receivers {
		b.wake(r)
	}
	b.releaseEntries()
	b.mu.Unlock()
	b.hub.drop(b)
}

// run receives from the watch tier until ctx is done, or until the broadcast is parked: its stream has no frame. The
// next frame then runs it again.
func (b *watchBroadcast) run(ctx context.Context) {
	if b.receiveAll(ctx) != errParked { //nolint:errorlint // it is never wrapped
		b.end()
	}
}

// receiveAll receives from replicas. After Unavailable it resumes, for up to resumeTimeout. Other errors end the
// broadcast, because each client must see them on its own stream.
func (b *watchBroadcast) receiveAll(ctx context.Context) error {
	for {
		err := b.watchReplicas(ctx)
		switch {
		case err == errParked: //nolint:errorlint // it is never wrapped
			return err
		case err == errOverflow: //nolint:errorlint // it is never wrapped
			b.overflowed.Store(true)
			continue
		case ctx.Err() != nil, status.Code(err) != codes.Unavailable,
			!b.hub.Discovery.Serves(b.query.GetResource()):
			return err
		}
		if b.unavailableSince.IsZero() {
			b.unavailableSince = time.Now()
			resumes.Inc()
		} else if time.Since(b.unavailableSince) > resumeTimeout {
			return err
		}
		_ = lifecycle.Sleep(ctx, retryDelay(b.unavailableSince))
	}
}

// watchReplicas receives from a replica, and from each successor that replaces it, until a stream breaks.
func (b *watchBroadcast) watchReplicas(ctx context.Context) (err error) {
	if b.stream == nil {
		b.stream, err = b.openReplica(ctx)
	}
	for err == nil {
		if err = b.receive(b.stream); err == errParked { //nolint:errorlint // it is never wrapped
			return err
		}
		b.stream.cancel()
		if b.stream = b.stream.successor(); b.stream != nil {
			err = nil
		}
	}
	return err
}

// receive dispatches a replica's frames until its stream ends, or the broadcast is parked.
func (b *watchBroadcast) receive(s *replicaStream) (err error) {
	defer recovery.ToError("a watch broadcast", &err)
	m := s.firstFrame
	s.firstFrame = nil
	for {
		if m == nil {
			if s.park(b.resume) {
				return errParked
			}
			if m, err = s.Recv(); err != nil {
				return err
			}
		}
		if m.End {
			return io.EOF
		}
		b.unavailableSince = time.Time{}
		b.sentBy(s)
		b.dispatch(m)
		m = nil
	}
}
