package log

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
	// backfillsBytes bounds what all of them hold that anybody uses or that are kept, by what each may come to hold.
	// Those beyond it wait.
	backfillsBytes = 128 << 20
	// backfillKept is how long a backfill is kept for others that resume from about the same place.
	backfillKept = 15 * time.Second
	// backfillReads is how many read from the log at a time.
	backfillReads = 2
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
	// room and reads are the turns: for holding what was read, and for reading.
	room, reads chan struct{}

	mu  sync.Mutex
	all []*Backfill
	// wanted is how many wait for room.
	wanted int
}

func newBackfills() backfills {
	return backfills{room: make(chan struct{}, backfillsBytes/backfillBytes), reads: make(chan struct{}, backfillReads)}
}

// Backfill is the events of a resource after a revision, up to another.
type Backfill struct {
	storedAs, history string
	after             int64
	done              chan struct{}
	cancel            context.CancelFunc

	// What follows belongs to the lock of all. users is how many watches wait for it or send from it; without users the
	// reading ends.
	users int
	// readAt is when its reading ended.
	readAt time.Time
	// hasRoom: it has its room. dropped: nobody finds it any more, and its room is given up when its reading ends.
	hasRoom, dropped bool

	// What follows may be read once done is closed.
	UpTo   int64 // every event up to this revision is here
	Events []*cache.Event
	err    error
	// cut: its time was up before it came to where memory goes on.
	cut bool
}

// Backfill answers the resource's events after a revision, as far as fits, for anybody who asks. low is where memory
// goes on. Call leave when they are sent.
func (l *Log) Backfill(ctx context.Context, storedAs string, after, low int64) (b *Backfill, leave func(), err error) {
	until := time.Now().Add(backfillTimeout)
	patience := time.NewTimer(backfillTimeout)
	defer patience.Stop()
	for missed := false; ; {
		b := l.backfills.join(storedAs, l.cache.History(), after, missed, func(ctx context.Context, b *Backfill) {
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
		case <-patience.C:
			leave()
			return nil, nil, errBackfillTimeout
		}
		short := b.err != nil || b.UpTo <= after
		switch {
		case b.after < after && short:
			// It began further back and has not come as far: this watch takes one of its own.
			leave()
			missed = true
			continue
		case b.cut && b.err != nil && time.Now().Before(until):
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
func (b *backfills) join(storedAs, history string, after int64, exact bool,
	begin func(context.Context, *Backfill)) *Backfill {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prune()
	for _, f := range b.all {
		if f.storedAs == storedAs && f.history == history && (f.after == after || f.after < after && !exact) &&
			(!f.ended() || f.err == nil && after < f.UpTo) {
			f.users++
			return f
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), backfillTimeout)
	f := &Backfill{
		storedAs: storedAs,
		history:  history,
		after:    after,
		done:     make(chan struct{}),
		users:    1,
		cancel:   cancel,
	}
	b.all = append(b.all, f)
	begin(ctx, f)
	return f
}

func (b *backfills) leave(f *Backfill) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.users--; f.users > 0 {
		return
	}
	if !f.ended() {
		f.cancel()
		b.drop(f)
	} else if b.wanted > 0 {
		b.drop(f)
	}
}

// prune drops unused backfills older than backfillKept, and then the oldest unused ones, one for each watch that waits
// for room. The lock is held.
func (b *backfills) prune() {
	wanted := b.wanted
	for _, f := range slices.Clone(b.all) {
		if f.users > 0 || !f.ended() {
			continue
		}
		if f.err != nil || time.Since(f.readAt) > backfillKept || wanted > 0 {
			if f.hasRoom {
				wanted--
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
	if f.ended() {
		b.giveUp(f)
	}
}

// giveUp gives a backfill's room to another; the lock is held.
func (b *backfills) giveUp(f *Backfill) {
	if f.hasRoom {
		f.hasRoom = false
		<-b.room
	}
}

// acquire waits for room, and for a turn to read.
func (b *backfills) acquire(ctx context.Context, f *Backfill) error {
	if err := b.acquireRoom(ctx, f); err != nil {
		return err
	}
	select {
	case b.reads <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *backfills) acquireRoom(ctx context.Context, f *Backfill) error {
	b.mu.Lock()
	select {
	case b.room <- struct{}{}:
		f.hasRoom = true
		b.mu.Unlock()
		return nil
	default:
	}
	b.wanted++
	b.prune() // which it could have
	b.mu.Unlock()
	var err error
	select {
	case b.room <- struct{}{}:
	case <-ctx.Done():
		err = ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wanted--
	f.hasRoom = err == nil
	return err
}

// end marks a backfill as read.
func (b *backfills) end(f *Backfill) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f.readAt = time.Now()
	close(f.done)
	if f.dropped || f.err != nil {
		b.giveUp(f)
	}
}

func (f *Backfill) ended() bool {
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// fill reads from the log until it has come to where memory goes on, or holds enough. It ends between two revisions.
func (l *Log) fill(ctx context.Context, b *Backfill, low int64) {
	defer l.backfills.end(b)
	defer b.cancel()
	defer recovery.ToError("reading "+b.storedAs+" from the log", &b.err)
	b.UpTo = b.after
	if b.err = l.backfills.acquire(ctx, b); b.err != nil {
		b.cut = true
		return
	}
	defer func() { <-l.backfills.reads }()
	l.replays.Inc()
	bytes := 0
	keep := eventlog.WithDecryption(ctx, l.keys, func(e *logv1.Event) error {
		if e.Type == logv1.Type_TYPE_RESET { // it cannot be opened
			return eventlog.ErrExpired
		}
		event := cache.EventOf(e)
		b.Events = append(b.Events, event)
		bytes += event.Size()
		return nil
	})
	for {
		b.err = eventlog.Replay(ctx, l.stored, b.storedAs, b.UpTo, func(e *logv1.Event) (bool, error) {
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
			return true, keep(e)
		})
		n := len(b.Events)
		for n > 0 && b.Events[n-1].Revision > b.UpTo {
			n--
			bytes -= b.Events[n].Size()
		}
		b.Events = b.Events[:n]
		if b.cut = ctx.Err() != nil; b.err == nil || errors.Is(b.err, eventlog.ErrExpired) || b.cut {
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
