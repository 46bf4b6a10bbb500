package watchfanout

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/eventlog"
)

// Resumes from about the same place share a reading; all readings together are bounded; one that nobody waits for ends (F8, S20).
func TestBackfillsAreSharedAndBounded(t *testing.T) {
	b := &backfills{reads: make(chan struct{}, backfillReads)}
	contexts := map[*backfill]context.Context{}
	begin := func(ctx context.Context, f *backfill) { contexts[f] = ctx }
	join := func(resource string, after int64) *backfill {
		t.Helper()
		f, err := b.join(resource, "h", after, begin)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first := join("pods", 100)
	if join("pods", 150) != first || join("nodes", 150) == first || join("pods", 50) == first {
		t.Error("the wrong ones share")
	}
	if f, _ := b.join("pods", "another history", 100, begin); f == first {
		t.Error("two histories share")
	}
	b.leave(first)
	if contexts[first].Err() != nil {
		t.Error("it ends though somebody waits")
	}
	b.leave(first)
	if contexts[first].Err() == nil {
		t.Error("it goes on though nobody waits")
	}
	close(first.done)
	n := 0
	for after := int64(1_000_000); ; after-- { // each further back than all before
		_, err := b.join("configmaps", "h", after, begin)
		if errors.Is(err, errBackfills) {
			break
		}
		if n++; n > 2*backfillsBytes/backfillBytes {
			t.Fatal("there is no bound")
		}
	}
	if len(b.all) > backfillsBytes/backfillBytes {
		t.Errorf("%d at once", len(b.all))
	}
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
		s := &Service{js: away, backfills: backfills{reads: make(chan struct{}, backfillReads)},
			metrics: &metrics{replays: prometheus.NewCounter(prometheus.CounterOpts{Name: "replays"})}}
		f, err := s.backfills.join("pods", "h", 100, func(context.Context, *backfill) {})
		if err != nil {
			t.Fatal(err)
		}
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
