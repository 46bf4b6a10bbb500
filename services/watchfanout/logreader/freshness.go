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
	// verifyPeriod is how often a replica compares itself with etcd.
	verifyPeriod = time.Second
	// staleAfter is how long the log may lack what etcd has until the replica reports itself unhealthy and ends its
	// streams, which go on at another.
	staleAfter = 4 * time.Second
)

// freshness is what a replica knows of its own age. Where registry cannot be asked the replica cannot tell, and goes on
// serving.
type freshness struct {
	// staleSince is when etcd first had what has not come; nil while nothing is missing.
	staleSince atomic.Pointer[time.Time]
}

// err says since when the replica is stale, or is nil.
func (f *freshness) err() error {
	if since := f.staleSince.Load(); since != nil {
		return status.Errorf(codes.Unavailable, "the event log has not brought what etcd has for %v",
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
			// It is late, and comes: everybody is, and another replica is not ahead.
		case err != nil && l.freshness.staleSince.CompareAndSwap(nil, &checkedAt):
			slog.Warn("The event log does not bring what etcd has", "revision", l.cache.Progress(), "etcd", r.Revision)
			l.ready.Set(eventLogCondition, fmt.Errorf("it has not brought what etcd had at %s", checkedAt.Format(time.TimeOnly)))
		case err == nil && l.freshness.staleSince.Swap(nil) != nil:
			slog.Info("The event log has come as far as etcd again", "revision", l.cache.Progress())
			l.ready.Set(eventLogCondition, nil)
		}
	}
}

// CheckFresh refuses a call where the replica is stale: another one may not be.
func (l *Reader) CheckFresh() error { return l.freshness.err() }
