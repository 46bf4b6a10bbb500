package watchfanout

import (
	"context"
	"errors"
	"sync"
	"time"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/watchfanout/cache"
)

const (
	// backfillBytes bounds what one backfill holds; a watch that is further behind goes on with the next one.
	backfillBytes = 16 << 20
	// backfillKept is how long a backfill is kept for others that resume from about the same place, and backfillCount how many are.
	backfillKept  = 15 * time.Second
	backfillCount = 8
	// backfillReads is how many read from the log at a time.
	backfillReads = 2
	// backfillTimeout bounds one reading.
	backfillTimeout = 30 * time.Second
)

// backfills are parts of the log that memory no longer holds, read again for watches that resume from there: once for all that do,
// and never at the pace of a client.
type backfills struct {
	mu    sync.Mutex
	all   []*backfill
	reads chan struct{}
}

// backfill is the events of a resource after a revision, up to another.
type backfill struct {
	storedAs, history string
	after             int64
	begun             time.Time
	done              chan struct{}

	// What follows may be read once done is closed.
	upTo   int64 // every event up to this revision is here
	events []*cache.Event
	err    error
}

// backfill answers the resource's events after a revision, as far as fits, for anybody who asks. low is where memory goes on.
func (s *Service) backfill(ctx context.Context, storedAs string, after, low int64) (*backfill, error) {
	for {
		b := s.backfills.find(storedAs, s.cache.History(), after, func(b *backfill) { go s.fill(b, low) })
		select {
		case <-b.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if b.after < after && (b.err != nil || b.upTo <= after) { // begun from further back, and it has not come as far: one of its own
			continue
		}
		return b, b.err
	}
}

// find finds a backfill that holds what comes after a revision, or begins one.
func (b *backfills) find(storedAs, history string, after int64, begin func(*backfill)) *backfill {
	b.mu.Lock()
	defer b.mu.Unlock()
	var kept []*backfill
	var found *backfill
	for _, f := range b.all {
		under := !f.ended()
		if !under && (f.err != nil || time.Since(f.begun) > backfillKept) {
			continue
		}
		kept = append(kept, f)
		if f.storedAs == storedAs && f.history == history && f.after <= after && (under || after < f.upTo) {
			found = f
		}
	}
	if found == nil {
		found = &backfill{storedAs: storedAs, history: history, after: after, begun: time.Now(), done: make(chan struct{})}
		kept = append(kept, found)
		begin(found)
	}
	if len(kept) > backfillCount { // the oldest that is done goes; who uses it has it
		for i, f := range kept {
			if f.ended() {
				kept = append(kept[:i], kept[i+1:]...)
				break
			}
		}
	}
	b.all = kept
	return found
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
func (s *Service) fill(b *backfill, low int64) {
	defer close(b.done)
	s.backfills.reads <- struct{}{}
	defer func() { <-s.backfills.reads }()
	ctx, cancel := context.WithTimeout(context.Background(), backfillTimeout)
	defer cancel()
	s.metrics.replays.Inc()
	bytes := 0
	b.upTo = b.after
	b.err = eventlog.Replay(ctx, s.js, b.storedAs, b.after, func(e *logv1.Event) (bool, error) {
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
		bytes += len(event.Item.JSON) + len(event.Item.Protobuf)
		return true, nil
	})
	if errors.Is(b.err, eventlog.ErrForgotten) && b.upTo > b.after { // what came before the log broke off is sound
		b.err = nil
	}
	n := len(b.events)
	for n > 0 && b.events[n-1].Revision > b.upTo {
		n--
	}
	b.events = b.events[:n]
}
