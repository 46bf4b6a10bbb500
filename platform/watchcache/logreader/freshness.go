package logreader

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// verifyPeriod is how often a replica compares its revision with etcd's.
	verifyPeriod = time.Second
	// staleAfter is how long the log may lack etcd's events before the replica is not ready and ends its streams. The
	// streams resume on another replica.
	staleAfter = 4 * time.Second
)

// freshness is a replica's result of the comparison with etcd. While registry is unreachable the replica cannot
// compare, and keeps the last result.
type freshness struct {
	// staleSince is when etcd had a revision that the log has not delivered; nil while the replica is fresh.
	staleSince atomic.Pointer[time.Time]
}

// err returns an UNAVAILABLE error if the replica is stale.
func (f *freshness) err() error {
	if since := f.staleSince.Load(); since != nil {
		return status.Errorf(codes.Unavailable, "the event log has not delivered etcd's newest events for %v",
			time.Since(*since).Round(time.Second))
	}
	return nil
}

// verify compares the replica with etcd until ctx is done.
func (l *Reader) verify(ctx context.Context) error {
	tick := time.NewTicker(verifyPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		checkedAt, progressBefore := time.Now(), l.cache.Progress()
		verifyCtx, cancel := context.WithTimeout(ctx, staleAfter)
		r, err := l.source.Revision(verifyCtx, &registryv1.RevisionRequest{})
		if err != nil {
			cancel()
			continue
		}
		err = l.Wait(verifyCtx, r.Revision)
		cancel()
		switch {
		case ctx.Err() != nil:
		case err != nil && l.cache.Progress() > progressBefore:
			// The log is late but advances: it is late for every replica, so another one is not ahead.
		case err != nil && l.freshness.staleSince.CompareAndSwap(nil, &checkedAt):
			slog.Warn("The event log is behind etcd", "revision", l.cache.Progress(), "etcd", r.Revision)
			l.ready.Set(eventLogCondition, fmt.Errorf("no etcd events since %s", checkedAt.Format(time.TimeOnly)))
		case err == nil && l.freshness.staleSince.Swap(nil) != nil:
			slog.Info("The event log has caught up with etcd", "revision", l.cache.Progress())
			l.ready.Set(eventLogCondition, nil)
		}
	}
}

// CheckFresh returns an UNAVAILABLE error if the replica is stale. The caller then tries another replica.
func (l *Reader) CheckFresh() error { return l.freshness.err() }
