package logreader

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// verifyPeriod is how often a reader compares its cache's revision with etcd's. catchUpPeriod applies until the
	// cache has reached etcd's revision for the first time.
	verifyPeriod  = time.Second
	catchUpPeriod = 200 * time.Millisecond
	// freshFor is how long the cache is fresh after etcd had the revision that the cache has reached.
	freshFor = 4 * verifyPeriod
)

// freshness is the result of the comparison with etcd. While etcd's revision is unknown, the reader keeps the last
// result. Its states:
//
//	starting ── etcd's revision reached ──────────────► fresh
//	any ─────── not reached, and did not advance ─────► stale
//	stale ───── reached, or advanced ─────────────────► fresh
type freshness struct {
	// staleSince is when etcd had a revision that the log has not delivered; nil while the cache is not stale.
	staleSince atomic.Pointer[time.Time]
	// caughtUpAt is when etcd had the latest revision that the cache has reached; nil: it has reached none.
	caughtUpAt atomic.Pointer[time.Time]
}

// verify compares the cache with etcd until ctx is done.
func (l *Reader) verify(ctx context.Context) error {
	tick := time.NewTicker(catchUpPeriod)
	defer tick.Stop()
	for {
		l.compare(ctx)
		l.cache.RecordRevisions()
		if l.freshness.caughtUpAt.Load() != nil {
			tick.Reset(verifyPeriod)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// compare waits until the cache has reached etcd's revision. The cache is stale if it does not advance within
// StaleAfter.
func (l *Reader) compare(ctx context.Context) {
	f := &l.freshness
	startedAt := time.Now()
	epoch, before := l.cache.At()
	compareCtx, cancel := context.WithTimeout(ctx, l.config.StaleAfter)
	defer cancel()
	revision, err := l.source.Revision(compareCtx)
	if err != nil {
		return
	}
	switch err = l.waitForEtcd(compareCtx, revision, epoch, before); {
	case err == nil:
		first := f.caughtUpAt.Swap(&startedAt) == nil
		if f.staleSince.Swap(nil) != nil || first {
			slog.Info("The event log has caught up with etcd", "revision", revision)
			l.ready.Set(eventLogCondition, nil)
		}
	case ctx.Err() != nil:
	case l.cache.Progress() != before: // it is late for every reader of the log, so another one is not ahead
		if f.staleSince.Swap(nil) != nil && f.caughtUpAt.Load() != nil {
			l.ready.Set(eventLogCondition, nil)
		}
	case f.staleSince.CompareAndSwap(nil, &startedAt):
		slog.Warn("The event log is behind etcd", "revision", before, "etcd", revision)
		l.ready.Set(eventLogCondition, fmt.Errorf("no etcd events since %s", startedAt.Format(time.TimeOnly)))
	}
}

// CheckFresh returns an UNAVAILABLE error if the cache is stale. The caller then tries another process.
func (l *Reader) CheckFresh() error {
	if since := l.freshness.staleSince.Load(); since != nil {
		return status.Errorf(codes.Unavailable, "the event log has not delivered etcd's newest events for %v",
			time.Since(*since).Round(time.Second))
	}
	return nil
}

// Fresh reports whether the cache has reached a revision that etcd had less than freshFor ago.
func (l *Reader) Fresh() bool { return l.freshWithin(freshFor) }

// JustVerified reports whether the cache has reached a revision that etcd had less than two verifyPeriods ago.
func (l *Reader) JustVerified() bool { return l.freshWithin(2 * verifyPeriod) }

func (l *Reader) freshWithin(d time.Duration) bool {
	at := l.freshness.caughtUpAt.Load()
	return at != nil && time.Since(*at) < d
}
