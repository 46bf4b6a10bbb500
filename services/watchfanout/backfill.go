package watchfanout

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/watchfanout/cache"
)

const (
	// backfillBytes bounds what one backfill holds; a watch that is further behind goes on with the next one.
	backfillBytes = 8 << 20
	// backfillsBytes bounds what all of them hold that anybody uses or that are kept, by what each may come to hold. A watch beyond it is
	// sent to list.
	backfillsBytes = 128 << 20
	// backfillKept is how long a backfill is kept for others that resume from about the same place.
	backfillKept = 15 * time.Second
	// backfillReads is how many read from the log at a time.
	backfillReads = 2
	// backfillTimeout bounds one reading, and its waiting for a turn.
	backfillTimeout = 30 * time.Second
	// backfillRetry is how long a reading that broke off waits until it goes on from where it had come.
	backfillRetry = 200 * time.Millisecond
)

// errBackfills says that too many watches resume from before what memory holds.
var errBackfills = errors.New("too many watches resume from too far back at once")

// backfills are parts of the log that memory no longer holds, read again for watches that resume from there: once for all that do,
// and never at the pace of a client.
type backfills struct {
	reads chan struct{}

	mu  sync.Mutex
	all []*backfill
}

// backfill is the events of a resource after a revision, up to another.
type backfill struct {
	storedAs, history string
	after             int64
	begun             time.Time
	done              chan struct{}
	// users is how many watches wait for it or send from it. It belongs to the lock of all; without users the reading ends.
	users  int
	cancel context.CancelFunc

	// What follows may be read once done is closed.
	upTo   int64 // every event up to this revision is here
	events []*cache.Event
	err    error
}

// backfill answers the resource's events after a revision, as far as fits, for anybody who asks. low is where memory goes on. Call leave
// when they are sent.
func (s *Service) backfill(ctx context.Context, storedAs string, after, low int64) (b *backfill, leave func(), err error) {
	for {
		b, err := s.backfills.join(storedAs, s.cache.History(), after, func(ctx context.Context, b *backfill) { go s.fill(ctx, b, low) })
		if err != nil {
			return nil, nil, err
		}
		leave := func() { s.backfills.leave(b) }
		select {
		case <-b.done:
		case <-ctx.Done():
			leave()
			return nil, nil, ctx.Err()
		case <-s.draining:
			leave()
			return nil, nil, errDraining
		}
		switch {
		case b.after < after && (b.err != nil || b.upTo <= after): // begun from further back, and it has not come as far: one of its own
			leave()
			continue
		case b.err != nil:
			leave()
			return nil, nil, b.err
		}
		return b, leave, nil
	}
}

// join finds a backfill that holds what comes after a revision, or begins one.
func (b *backfills) join(storedAs, history string, after int64, begin func(context.Context, *backfill)) (*backfill, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = slices.DeleteFunc(b.all, func(f *backfill) bool {
		return f.users == 0 && f.ended() && (f.err != nil || time.Since(f.begun) > backfillKept)
	})
	for _, f := range b.all {
		if f.storedAs == storedAs && f.history == history && f.after <= after && (!f.ended() || f.err == nil && after < f.upTo) {
			f.users++
			return f, nil
		}
	}
	if len(b.all) >= backfillsBytes/backfillBytes {
		unused := slices.IndexFunc(b.all, func(f *backfill) bool { return f.users == 0 })
		if unused < 0 {
			return nil, errBackfills
		}
		b.all = slices.Delete(b.all, unused, unused+1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), backfillTimeout)
	f := &backfill{storedAs: storedAs, history: history, after: after, begun: time.Now(), done: make(chan struct{}), users: 1, cancel: cancel}
	b.all = append(b.all, f)
	begin(ctx, f)
	return f, nil
}

func (b *backfills) leave(f *backfill) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.users--; f.users == 0 && !f.ended() {
		f.cancel()
	}
}

func (f *backfill) ended() bool {
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// fill reads from the log until it has come to where memory goes on, or holds enough. It ends between two revisions.
func (s *Service) fill(ctx context.Context, b *backfill, low int64) {
	defer close(b.done)
	defer b.cancel()
	defer func() {
		if r := recover(); r != nil {
			b.err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	b.upTo = b.after
	select {
	case s.backfills.reads <- struct{}{}:
	case <-ctx.Done():
		b.err = ctx.Err()
		return
	}
	defer func() { <-s.backfills.reads }()
	s.metrics.replays.Inc()
	bytes := 0
	for {
		b.err = eventlog.Replay(ctx, s.js, b.storedAs, b.upTo, func(e *logv1.Event) (bool, error) {
			if n := len(b.events); n > 0 && e.Revision > b.events[n-1].Revision {
				b.upTo = b.events[n-1].Revision
				if bytes > backfillBytes || b.upTo >= low {
					return false, nil
				}
			}
			if e.Type == logv1.Type_TYPE_UNSPECIFIED { // everything up to here has come
				b.upTo = e.Revision
				return e.Revision < low, nil
			}
			event := cache.EventOf(e)
			b.events = append(b.events, event)
			bytes += event.Size()
			return true, nil
		})
		n := len(b.events)
		for n > 0 && b.events[n-1].Revision > b.upTo {
			n--
			bytes -= b.events[n].Size()
		}
		b.events = b.events[:n]
		if b.err == nil || errors.Is(b.err, eventlog.ErrForgotten) || ctx.Err() != nil {
			break
		}
		select { // NATS is away: what it holds is not forgotten for that
		case <-ctx.Done():
		case <-time.After(backfillRetry):
		}
	}
	if b.err != nil && b.upTo > b.after { // what came before the log broke off is sound
		b.err = nil
	}
}
