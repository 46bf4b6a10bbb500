package logreader

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Watches that resume from about the same revision share a backfill. A read without users is canceled (F8).
func TestBackfillsAreShared(t *testing.T) {
	all := newBackfills()
	b := &all
	contexts := map[*Backfill]context.Context{}
	begin := func(ctx context.Context, f *Backfill) { contexts[f] = ctx }
	join := func(resource string, after int64) *Backfill { return b.join(resource, "h", after, false, begin) }
	first := join("pods", 100)
	if join("pods", 150) != first || join("nodes", 150) == first || join("pods", 50) == first {
		t.Error("the wrong watches share")
	}
	if b.join("pods", "another epoch", 100, false, begin) == first {
		t.Error("two epochs share")
	}
	if b.join("pods", "h", 120, true, begin) == first {
		t.Error("an exact join returns a backfill that begins earlier")
	}
	b.leave(first)
	if contexts[first].Err() != nil {
		t.Error("the read is canceled although a watch waits")
	}
	b.leave(first)
	if contexts[first].Err() == nil {
		t.Error("the read continues although no watch waits")
	}
	if join("pods", 100) == first {
		t.Error("join returns a dropped backfill")
	}
}

// All backfills together are bounded, and further backfills wait (S20).
func TestBackfillsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := newBackfills()
		b := &all
		const quota = totalBackfillBytes / backfillBytes
		var holding, failed atomic.Int32
		read := func(ctx context.Context, f *Backfill) {
			go func() {
				if f.err = b.acquire(ctx, f); f.err == nil {
					holding.Add(1)
					<-b.readSlots
				} else {
					failed.Add(1)
				}
				b.finish(f)
			}()
		}
		var joined []*Backfill
		for n := range int64(quota + 5) {
			joined = append(joined, b.join("configmaps", "h", 1000-n, true, read))
		}
		synctest.Wait()
		if holding.Load() != quota {
			t.Errorf("%d backfills hold quota, of %d", holding.Load(), quota)
		}
		slices.SortStableFunc(joined, func(f, g *Backfill) int { // finished backfills first
			switch {
			case f.isFinished() == g.isFinished():
				return 0
			case f.isFinished():
				return -1
			}
			return 1
		})
		for _, f := range joined[:2] { // a watch that has sent its backfill releases it
			b.leave(f)
		}
		synctest.Wait()
		waiting := func() int {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.quotaWaiters
		}
		if holding.Load() != quota+2 || waiting() != 3 {
			t.Errorf("%d have read, and %d wait", holding.Load(), waiting())
		}
		time.Sleep(backfillTimeout)
		synctest.Wait()
		if failed.Load() != 3 || waiting() != 0 {
			t.Errorf("%d timed out, and %d wait", failed.Load(), waiting())
		}
		for _, f := range joined[2:] {
			b.leave(f)
		}
		time.Sleep(2 * backfillTTL)
		b.sweep()
		if len(b.all) != 0 || len(b.quota) != 0 {
			t.Errorf("%d are left, and %d hold quota", len(b.all), len(b.quota))
		}
	})
}

// chunks is a log that returns a chunk at each call.
type chunks []*logv1.Chunk

func (c *chunks) Messages(_ context.Context, _ *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	next := (*c)[0]
	*c = (*c)[1:]
	return each(next)
}

// A backfill continues in the log that follows a lost log, if it has the same epoch.
func TestABackfillContinuesInARefilledLog(t *testing.T) {
	chunk := func(created int64, events ...*logv1.Event) *logv1.Chunk {
		c := &logv1.Chunk{Created: created}
		for _, e := range events {
			if e.Type == logv1.Type_TYPE_ADDED {
				e.StorageResource, e.Name, e.Object = "pods", "p", &logv1.Object{Json: []byte("{}")}
			}
			data, err := proto.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			c.Last++
			c.Messages = append(c.Messages, &logv1.StoredMessage{Sequence: c.Last, Id: "m", Data: data})
		}
		c.Through = c.Last
		return c
	}
	at := func(kind logv1.Type, revision int64, epoch string) *logv1.Event {
		return &logv1.Event{Type: kind, Revision: revision, Epoch: epoch}
	}
	const added, reset, progress = logv1.Type_TYPE_ADDED, logv1.Type_TYPE_RESET, logv1.Type_TYPE_UNSPECIFIED
	for name, c := range map[string]struct {
		epoch     string
		revisions []int64
		upTo      int64
	}{
		"the same epoch": {"h", []int64{101, 102, 103}, 200},
		"another epoch":  {"i", []int64{101}, 101}, // it ends at the reset, and not after a timeout
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log := chunks{
					chunk(1, at(added, 101, "h"), at(added, 102, "h")),
					chunk(2), // a recreated stream
					chunk(2, at(reset, 50, c.epoch), at(added, 101, c.epoch), at(added, 102, c.epoch),
						at(added, 103, c.epoch), at(progress, 200, c.epoch)),
				}
				s := newReader(Source{Stream: &log})
				b := s.backfills.join("pods", "h", 100, false, func(context.Context, *Backfill) {})
				s.fill(t.Context(), b, 200)
				var revisions []int64
				for _, e := range b.Events {
					revisions = append(revisions, e.Revision)
				}
				if !slices.Equal(revisions, c.revisions) || b.UpTo != c.upTo || b.err != nil {
					t.Errorf("it has the events %v up to %d, %v", revisions, b.UpTo, b.err)
				}
			})
		})
	}
}

// failingLog fails a number of reads, and then no longer has the messages.
type failingLog struct{ failures int }

func (a *failingLog) Messages(context.Context, *logv1.ReadRequest, func(*logv1.Chunk) error) error {
	if a.failures--; a.failures >= 0 {
		return nats.ErrDisconnected
	}
	return eventlog.ErrExpired
}

// A watch does not expire because NATS is unreachable when it resumes. It expires if the log lost its events, or after
// backfillTimeout.
func TestABackfillWaitsForNATS(t *testing.T) {
	fill := func(ctx context.Context, failing *failingLog) error {
		s := newReader(Source{Stream: failing})
		f := s.backfills.join("pods", "h", 100, false, func(context.Context, *Backfill) {})
		s.fill(ctx, f, 200)
		return f.err
	}
	failing := &failingLog{failures: 3}
	if err := fill(t.Context(), failing); !errors.Is(err, eventlog.ErrExpired) || failing.failures != -1 {
		t.Errorf("%v, with %d times left", err, failing.failures)
	}
	ctx, cancel := context.WithTimeout(t.Context(), backfillRetry)
	defer cancel()
	if err := fill(ctx, &failingLog{failures: 1 << 20}); !errors.Is(err, nats.ErrDisconnected) {
		t.Errorf("without NATS: %v", err)
	}
}

// A watch that joins a backfill late waits for backfillTimeout, even if the read times out earlier.
func TestAJoinerOutlivesTheReadingItJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failures := int((backfillTimeout + 5*time.Second) / backfillRetry)
		s := newReader(Source{Stream: &failingLog{failures: failures}})
		began := time.Now()
		type end struct {
			after time.Duration
			err   error
		}
		ends := make(chan end, 2)
		wait := func(delay time.Duration) {
			time.Sleep(delay)
			_, _, err := s.Backfill(t.Context(), nil, "pods", "", 100, 200)
			ends <- end{time.Since(began), err}
		}
		go wait(0)
		go wait(backfillTimeout - time.Second)
		first, second := <-ends, <-ends
		if first.after != backfillTimeout || first.err == nil || errors.Is(first.err, eventlog.ErrExpired) {
			t.Errorf("the first ends after %v: %v", first.after, first.err)
		}
		if second.after < backfillTimeout+4*time.Second || second.after > 2*backfillTimeout ||
			!errors.Is(second.err, eventlog.ErrExpired) {
			t.Errorf("the second ends after %v: %v", second.after, second.err)
		}
		if len(s.backfills.quota)+len(s.backfills.readSlots) != 0 {
			t.Errorf("%d hold quota, %d read", len(s.backfills.quota), len(s.backfills.readSlots))
		}
	})
}

// An unused backfill stays cached while there is quota, so that a watch that reads pieces finds it again.
func TestABackfillIsCachedBetweenPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := newBackfills()
		b := &all
		read := func(ctx context.Context, f *Backfill) {
			go func() {
				if f.err = b.acquire(ctx, f); f.err == nil {
					<-b.readSlots
				}
				f.UpTo = f.after + 100
				b.finish(f)
			}()
		}
		const quota = totalBackfillBytes / backfillBytes
		var mine []*Backfill
		for n := range int64(quota) {
			f := b.join("configmaps", "h", 1000*n, false, read)
			<-f.done
			b.leave(f)
			mine = append(mine, f)
		}
		for n, f := range mine {
			if b.join("configmaps", "h", 1000*int64(n)+50, false, read) != f {
				t.Errorf("the %dth was given up though there was room", n)
			}
			b.leave(f)
		}
		extra := b.join("pods", "h", 1, false, read) // exceeds the quota, so the oldest is dropped
		<-extra.done
		synctest.Wait()
		if extra.err != nil || len(b.all) != quota || len(b.quota) != quota {
			t.Errorf("%v, %d are cached, and %d hold quota", extra.err, len(b.all), len(b.quota))
		}
		b.leave(extra)
		time.Sleep(2 * backfillTTL)
		b.sweep()
		if len(b.all)+len(b.quota) != 0 {
			t.Errorf("%d are left", len(b.all))
		}
	})
}

// The revisions of another epoch do not continue a watch: the log has a reset that the watch must not skip.
func TestABackfillIsOfItsWatchsEpoch(t *testing.T) {
	s := newReader(Source{Stream: &failingLog{}})
	if _, _, err := s.Backfill(t.Context(), nil, "pods", "another", 100, 200); !errors.Is(err, eventlog.ErrExpired) {
		t.Errorf("%v", err)
	}
}
