package watchfanout

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/eventlog"
)

// Resumes from about the same place share a reading; all readings together are bounded; one that nobody waits for ends (F8, S20).
func TestBackfillsAreSharedAndBounded(t *testing.T) {
	all := newBackfills()
	b := &all
	contexts := map[*backfill]context.Context{}
	begin := func(ctx context.Context, f *backfill) { contexts[f] = ctx }
	join := func(resource string, after int64) *backfill { return b.join(resource, "h", after, false, begin) }
	first := join("pods", 100)
	if join("pods", 150) != first || join("nodes", 150) == first || join("pods", 50) == first {
		t.Error("the wrong ones share")
	}
	if b.join("pods", "another history", 100, false, begin) == first {
		t.Error("two histories share")
	}
	if b.join("pods", "h", 120, true, begin) == first {
		t.Error("who has found that it does not come as far joins it again")
	}
	b.leave(first)
	if contexts[first].Err() != nil {
		t.Error("it ends though somebody waits")
	}
	b.leave(first)
	if contexts[first].Err() == nil {
		t.Error("it goes on though nobody waits")
	}
	if join("pods", 100) == first {
		t.Error("who comes joins one that was given up")
	}
}

func TestBackfillsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := newBackfills()
		b := &all
		const room = backfillsBytes / backfillBytes
		var holding, failed atomic.Int32
		read := func(ctx context.Context, f *backfill) {
			go func() {
				if f.err = b.begin(ctx, f); f.err == nil {
					holding.Add(1)
					<-b.reads
				} else {
					failed.Add(1)
				}
				b.end(f)
			}()
		}
		var joined []*backfill
		for n := range int64(room + 5) {
			joined = append(joined, b.join("configmaps", "h", 1000-n, true, read))
		}
		synctest.Wait()
		if holding.Load() != room {
			t.Errorf("%d hold what they have read, of %d", holding.Load(), room)
		}
		slices.SortStableFunc(joined, func(f, g *backfill) int { // those that have read first
			switch {
			case f.ended() == g.ended():
				return 0
			case f.ended():
				return -1
			}
			return 1
		})
		for _, f := range joined[:2] { // whoever has sent what it had makes room
			b.leave(f)
		}
		synctest.Wait()
		waiting := func() int {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.wanted
		}
		if holding.Load() != room+2 || waiting() != 3 {
			t.Errorf("%d have read, and %d wait", holding.Load(), waiting())
		}
		time.Sleep(backfillTimeout)
		synctest.Wait()
		if failed.Load() != 3 || waiting() != 0 {
			t.Errorf("%d were told that it takes too long, and %d wait", failed.Load(), waiting())
		}
		for _, f := range joined[2:] {
			b.leave(f)
		}
		time.Sleep(2 * backfillKept)
		b.sweep()
		if len(b.all) != 0 || len(b.room) != 0 {
			t.Errorf("%d are left, and %d hold room", len(b.all), len(b.room))
		}
	})
}

// awayFor is a NATS that cannot be reached a few times, and then no longer has what is asked for.
type awayFor struct {
	jetstream.JetStream
	times int
}

func (a *awayFor) Stream(context.Context, string) (jetstream.Stream, error) {
	if a.times--; a.times >= 0 {
		return nil, nats.ErrDisconnected
	}
	return nil, eventlog.ErrForgotten
}

// A watch is not sent to list because NATS was away when it resumed: only what is forgotten is gone, or what nobody could say in time.
func TestABackfillWaitsForNATS(t *testing.T) {
	fill := func(ctx context.Context, away *awayFor) error {
		s := &Service{js: away, backfills: newBackfills(),
			metrics: &metrics{replays: prometheus.NewCounter(prometheus.CounterOpts{Name: "replays"})}}
		f := s.backfills.join("pods", "h", 100, false, func(context.Context, *backfill) {})
		s.fill(ctx, f, 200)
		return f.err
	}
	away := &awayFor{times: 3}
	if err := fill(t.Context(), away); !errors.Is(err, eventlog.ErrForgotten) || away.times != -1 {
		t.Errorf("%v, with %d times left", err, away.times)
	}
	ctx, cancel := context.WithTimeout(t.Context(), backfillRetry)
	defer cancel()
	if err := fill(ctx, &awayFor{times: 1 << 20}); !errors.Is(err, nats.ErrDisconnected) {
		t.Errorf("without NATS: %v", err)
	}
}
