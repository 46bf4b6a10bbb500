package logreader

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/watchfanout/cache"
)

const (
	// backfillBytes bounds what one backfill holds; a watch that is further behind goes on with the next one.
	backfillBytes = 8 << 20
	// totalBackfillBytes bounds what all of them hold that anybody uses or that are kept, by what each may come to hold.
	// Those beyond it wait.
	totalBackfillBytes = 128 << 20
	// backfillTTL is how long a backfill is kept for others that resume from about the same place.
	backfillTTL = 15 * time.Second
	// maxBackfillReads is how many read from the log at a time.
	maxBackfillReads = 2
	// backfillTimeout bounds one reading and its waiting for a turn, and how long a watch waits.
	backfillTimeout = 30 * time.Second
	// backfillRetry is how long a reading that broke off waits until it goes on from where it had come.
	backfillRetry = 200 * time.Millisecond
)

// errBackfillTimeout says that a watch has waited for too long.
var errBackfillTimeout = errors.New("the log could not be read in time")

// backfills are parts of the log that memory no longer holds, read again for watches that resume from there: once for
// all that do, and never at the pace of a client.
type backfills struct {
	// quota and reads are the turns: for holding what was read, and for reading.
	quota, readSlots chan struct{}

	mu  sync.Mutex
	all []*Backfill
	// quotaWaiters is how many wait for room.
	quotaWaiters int
}

func newBackfills() backfills {
	return backfills{
		quota:     make(chan struct{}, totalBackfillBytes/backfillBytes),
		readSlots: make(chan struct{}, maxBackfillReads),
	}
}

// Backfill is the events of a resource after a revision, up to another.
type Backfill struct {
	storageResource, epoch string
	after                  int64
	done                   chan struct{}
	cancel                 context.CancelFunc

	// What follows belongs to the lock of all. users is how many watches wait for it or send from it; without users the
	// reading ends.
	users int
	// readAt is when its reading ended.
	readAt time.Time
	// hasQuota: it has its room. dropped: nobody finds it any more, and its room is given up when its reading ends.
	hasQuota, dropped bool

	// What follows may be read once done is closed.
	UpTo   int64 // every event up to this revision is here
	Events []*cache.Event
	err    error
	// timedOut: its time was up before it came to where memory goes on.
	timedOut bool
}

// Backfill answers the resource's events after a revision, as far as fits, for anybody who asks. low is where memory
// goes on. Call leave when they are sent.
func (l *Reader) Backfill(
	ctx context.Context,
	storageResource string,
	after, low int64,
) (b *Backfill, leave func(), err error) {
	deadline := time.Now().Add(backfillTimeout)
	timer := time.NewTimer(backfillTimeout)
	defer timer.Stop()
	for exact := false; ; {
		b := l.backfills.join(storageResource, l.cache.Epoch(), after, exact, func(ctx context.Context, b *Backfill) {
			go l.fill(ctx, b, low)
		})
		leave := func() { l.backfills.leave(b) }
		select {
		case <-b.done:
		case <-ctx.Done():
			leave()
			return nil, nil, ctx.Err()
		case <-l.draining:
			leave()
			return nil, nil, rpc.ErrDraining
		case <-timer.C:
			leave()
			return nil, nil, errBackfillTimeout
		}
		incomplete := b.err != nil || b.UpTo <= after
		switch {
		case b.after < after && incomplete:
			// It began further back and has not come as far: this watch takes one of its own.
			leave()
			exact = true
			continue
		case b.timedOut && b.err != nil && time.Now().Before(deadline):
			// It was given up, or its time was up, and this watch's is not.
			leave()
			continue
		case b.err != nil:
			leave()
			return nil, nil, b.err
		}
		return b, leave, nil
	}
}

// join finds a backfill that holds what comes after a revision, or begins one. exact: only one that begins just there.
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

// prune drops unused backfills older than backfillTTL, and then the oldest unused ones, one for each watch that waits
// for room. The lock is held.
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

// drop has nobody find a backfill any more; the lock is held.
func (b *backfills) drop(f *Backfill) {
	b.all = slices.DeleteFunc(b.all, func(o *Backfill) bool { return o == f })
	f.dropped = true
	if f.isFinished() {
		b.releaseQuota(f)
	}
}

// releaseQuota gives a backfill's room to another; the lock is held.
func (b *backfills) releaseQuota(f *Backfill) {
	if f.hasQuota {
		f.hasQuota = false
		<-b.quota
	}
}

// acquire waits for room, and for a turn to read.
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
	b.prune() // which it could have
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

// fill reads from the log until it has come to where memory goes on, or holds enough. It ends between two revisions.
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
	appendEvent := eventlog.WithDecryption(ctx, l.dataKeys, func(e *logv1.Event) error {
		if e.Type == logv1.Type_TYPE_RESET { // it cannot be opened
			return eventlog.ErrExpired
		}
		event := cache.EventOf(e)
		b.Events = append(b.Events, event)
		bytes += event.Size()
		return nil
	})
	for {
		b.err = eventlog.Replay(ctx, l.streamReader, b.storageResource, b.UpTo, func(e *logv1.Event) (bool, error) {
			if n := len(b.Events); n > 0 && e.Revision > b.Events[n-1].Revision {
				b.UpTo = b.Events[n-1].Revision
				if bytes > backfillBytes || b.UpTo >= low {
					return false, nil
				}
			}
			if e.Type == logv1.Type_TYPE_UNSPECIFIED { // everything up to here has come
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
		select { // NATS is away: what it holds is not forgotten for that
		case <-ctx.Done():
		case <-time.After(backfillRetry):
		}
	}
	if b.err != nil && b.UpTo > b.after { // what came before the log broke off is sound
		b.err = nil
	}
}
