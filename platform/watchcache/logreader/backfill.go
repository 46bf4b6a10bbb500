package logreader

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// backfillBytes bounds one backfill. A watch that is further behind continues with the next one.
	backfillBytes = 8 << 20
	// totalBackfillBytes bounds all backfills in use or cached, at backfillBytes each. Further backfills wait.
	totalBackfillBytes = 128 << 20
	// backfillTTL is how long a backfill is cached for watches that resume from about the same revision.
	backfillTTL = 15 * time.Second
	// maxBackfillReads bounds the concurrent reads of the log.
	maxBackfillReads = 2
	// backfillTimeout bounds the read of a backfill with its wait for quota, and the wait of a watch.
	backfillTimeout = 30 * time.Second
	// backfillRetry is the pause before a failed read continues from its last revision.
	backfillRetry = 200 * time.Millisecond
)

// errBackfillTimeout means that a watch has waited for backfillTimeout.
var errBackfillTimeout = errors.New("timed out reading the event log")

// backfills are parts of the log that the rings no longer hold, read for watches that resume from there. All watches
// that need a part share it, and no client delays a read.
type backfills struct {
	// quota has a slot for each backfill in memory, and readSlots for each read in progress.
	quota, readSlots chan struct{}

	mu  sync.Mutex
	all []*Backfill
	// quotaWaiters counts the backfills that wait for quota.
	quotaWaiters int
}

func newBackfills() backfills {
	return backfills{
		quota:     make(chan struct{}, totalBackfillBytes/backfillBytes),
		readSlots: make(chan struct{}, maxBackfillReads),
	}
}

// Backfill has the events of a resource from one revision to another. Its states:
//
//	waiting ── quota and a read slot acquired ────────────────────► reading
//	waiting, reading ── last user left ───────────────────────────► dropped
//	waiting, reading ── backfillTimeout, or error ────────────────► finished
//	reading ── low reached, or backfillBytes exceeded ────────────► finished
//	finished ─ last user left, then backfillTTL or quota needed ──► dropped
//
// A dropped backfill releases its quota when its read ends.
type Backfill struct {
	storageResource, epoch string
	after                  int64
	done                   chan struct{}
	cancel                 context.CancelFunc

	// backfills.mu guards users, readAt, hasQuota and dropped. users counts the watches that wait for the backfill or
	// send from it. Without users the read is canceled.
	users int
	// readAt is when the read ended.
	readAt time.Time
	// hasQuota: it holds a quota slot. dropped: join does not return it, and its quota is released when its read ends.
	hasQuota, dropped bool

	// The fields below are constant once done is closed.
	UpTo   int64 // has every event up to this revision
	Events []*cache.Event
	err    error
	// timedOut: the read was canceled or timed out before it reached low.
	timedOut bool
}

// Backfill returns the resource's events after a revision of an epoch, up to about backfillBytes. low is the oldest
// revision that the ring can resume from. If the log is of another epoch, the error is eventlog.ErrExpired. An empty
// epoch is not known. The caller calls leave when it has sent the events. A closed stop ends the wait with
// rpc.ErrDraining.
func (l *Reader) Backfill(
	ctx context.Context,
	stop <-chan struct{},
	storageResource, epoch string,
	after, low int64,
) (b *Backfill, leave func(), err error) {
	if !l.config.Backfills {
		return nil, nil, eventlog.ErrExpired
	}
	deadline := time.Now().Add(backfillTimeout)
	timer := time.NewTimer(backfillTimeout)
	defer timer.Stop()
	for exact := false; ; {
		current := l.cache.Epoch()
		if epoch != "" && epoch != current { // the revisions of two epochs do not continue each other
			return nil, nil, eventlog.ErrExpired
		}
		b := l.backfills.join(storageResource, current, after, exact, func(ctx context.Context, b *Backfill) {
			go l.fill(ctx, b, low)
		})
		leave := func() { l.backfills.leave(b) }
		select {
		case <-b.done:
		case <-ctx.Done():
			leave()
			return nil, nil, ctx.Err()
		case <-stop:
			leave()
			return nil, nil, rpc.ErrDraining
		case <-timer.C:
			leave()
			return nil, nil, errBackfillTimeout
		}
		incomplete := b.err != nil || b.UpTo <= after
		switch {
		case b.after < after && incomplete:
			// It began at an earlier revision and does not reach past this watch's: this watch needs its own.
			leave()
			exact = true
			continue
		case b.timedOut && b.err != nil && time.Now().Before(deadline):
			// The read was canceled or timed out before this watch's deadline.
			leave()
			continue
		case b.err != nil:
			leave()
			return nil, nil, b.err
		}
		return b, leave, nil
	}
}

// join returns a backfill with the events after a revision, or starts one. If exact, the backfill must begin at that
// revision.
func (b *backfills) join(storageResource, epoch string, after int64, exact bool,
	start func(context.Context, *Backfill)) *Backfill {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prune()
	for _, f := range b.all {
		if f.storageResource == storageResource && f.epoch == epoch &&
			(f.after == after || f.after < after && !exact) &&
			(!f.isFinished() || f.err == nil && after < f.UpTo) {
			f.users++
			return f
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), backfillTimeout)
	f := &Backfill{
		storageResource: storageResource,
		epoch:           epoch,
		after:           after,
		done:            make(chan struct{}),
		users:           1,
		cancel:          cancel,
	}
	b.all = append(b.all, f)
	start(ctx, f)
	return f
}

func (b *backfills) leave(f *Backfill) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.users--; f.users > 0 {
		return
	}
	if !f.isFinished() {
		f.cancel()
		b.drop(f)
	} else if b.quotaWaiters > 0 {
		b.drop(f)
	}
}

// prune drops unused backfills older than backfillTTL. It then drops the oldest unused ones, one for each backfill that
// waits for quota. The caller holds mu.
func (b *backfills) prune() {
	waiters := b.quotaWaiters
	for _, f := range slices.Clone(b.all) {
		if f.users > 0 || !f.isFinished() {
			continue
		}
		if f.err != nil || time.Since(f.readAt) > backfillTTL || waiters > 0 {
			if f.hasQuota {
				waiters--
			}
			b.drop(f)
		}
	}
}

func (b *backfills) sweep() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prune()
}

// drop removes a backfill from the list. The caller holds mu.
func (b *backfills) drop(f *Backfill) {
	b.all = slices.DeleteFunc(b.all, func(o *Backfill) bool { return o == f })
	f.dropped = true
	if f.isFinished() {
		b.releaseQuota(f)
	}
}

// releaseQuota releases a backfill's quota slot. The caller holds mu.
func (b *backfills) releaseQuota(f *Backfill) {
	if f.hasQuota {
		f.hasQuota = false
		<-b.quota
	}
}

// acquire waits for a quota slot, and then for a read slot.
func (b *backfills) acquire(ctx context.Context, f *Backfill) error {
	if err := b.acquireQuota(ctx, f); err != nil {
		return err
	}
	select {
	case b.readSlots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *backfills) acquireQuota(ctx context.Context, f *Backfill) error {
	b.mu.Lock()
	select {
	case b.quota <- struct{}{}:
		f.hasQuota = true
		b.mu.Unlock()
		return nil
	default:
	}
	b.quotaWaiters++
	b.prune() // may release a slot
	b.mu.Unlock()
	var err error
	select {
	case b.quota <- struct{}{}:
	case <-ctx.Done():
		err = ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.quotaWaiters--
	f.hasQuota = err == nil
	return err
}

// finish marks a backfill as read.
func (b *backfills) finish(f *Backfill) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f.readAt = time.Now()
	close(f.done)
	if f.dropped || f.err != nil {
		b.releaseQuota(f)
	}
}

func (f *Backfill) isFinished() bool {
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// fill reads from the log until it reaches low, or has more than backfillBytes. The backfill ends between two
// revisions.
func (l *Reader) fill(ctx context.Context, b *Backfill, low int64) {
	defer l.backfills.finish(b)
	defer b.cancel()
	defer recovery.ToError("reading "+b.storageResource+" from the log", &b.err)
	b.UpTo = b.after
	if b.err = l.backfills.acquire(ctx, b); b.err != nil {
		b.timedOut = true
		return
	}
	defer func() { <-l.backfills.readSlots }()
	l.replays.Inc()
	bytes := 0
	appendEvent := eventlog.WithDecryption(ctx, l.source.Keys, func(e *logv1.Event) error {
		if e.Type == logv1.Type_TYPE_RESET { // the message cannot be decrypted
			return eventlog.ErrExpired
		}
		event := cache.EventOf(e)
		b.Events = append(b.Events, event)
		bytes += event.Size()
		return nil
	})
	for {
		stream, resource := l.source.Stream, b.storageResource
		b.err = l.config.Log.Replay(ctx, stream, resource, b.UpTo, b.epoch, func(e *logv1.Event) (bool, error) {
			if n := len(b.Events); n > 0 && e.Revision > b.Events[n-1].Revision {
				b.UpTo = b.Events[n-1].Revision
				if bytes > backfillBytes || b.UpTo >= low {
					return false, nil
				}
			}
			if e.Type == logv1.Type_TYPE_UNSPECIFIED { // every event up to here has been read
				b.UpTo = e.Revision
				return e.Revision < low, nil
			}
			return true, appendEvent(e)
		})
		n := len(b.Events)
		for n > 0 && b.Events[n-1].Revision > b.UpTo {
			n--
			bytes -= b.Events[n].Size()
		}
		b.Events = b.Events[:n]
		if b.timedOut = ctx.Err() != nil; b.err == nil || errors.Is(b.err, eventlog.ErrExpired) || b.timedOut {
			break
		}
		// NATS is unreachable, or has lost the log, and the publisher refills it.
		_ = lifecycle.Sleep(ctx, backfillRetry)
	}
	if b.err != nil && b.UpTo > b.after { // the events before the failure are valid
		b.err = nil
	}
}
