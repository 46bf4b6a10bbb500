// Package logreader reads the event log into a cache, compares the cache's revision with etcd's, and reads events again
// that the rings no longer hold. It does not serve clients.
//
// Run starts two tasks: one applies the log to the cache, and one compares its revision with etcd's. Each backfill has
// a goroutine of its own.
package logreader

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/cache"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Config holds the settings in which the readers of watchfanout and of registry differ.
type Config struct {
	// Log identifies the log.
	Log eventlog.LogID
	// StaleAfter is how long the log may lack etcd's events and not advance before the cache is stale.
	StaleAfter time.Duration
	// Backfills enables Backfill. Without it Backfill returns eventlog.ErrExpired.
	Backfills bool
	// OnEvent, if set, is called with each event of the log before the cache applies it. It must not block.
	OnEvent func(*logv1.Event)
	// Differences counts differences by resource. A reader that runs needs it.
	Differences *prometheus.CounterVec
}

// Reader reads the event log into a cache.
type Reader struct {
	config Config
	cache  *cache.Cache
	nats   *nats.Conn
	source Source
	// requestProgress makes the publisher publish its progress.
	requestProgress func() error

	ready *lifecycle.Readiness
	// revisions shares concurrent requests for etcd's revision.
	revisions coalesce.Group[int64]
	// progressRequestedAt is when Wait last requested a progress message; nil: never.
	progressRequestedAt atomic.Pointer[time.Time]
	// stalledAt is when a read last timed out waiting for etcd's revision. A successful read sets it to nil.
	stalledAt atomic.Pointer[time.Time]
	freshness freshness
	backfills backfills
	replays   prometheus.Counter
	differing differing
	// checks shares the comparisons of a resource with etcd, and runs a single comparison at a time.
	checks coalesce.Group[*checked]
}

// New returns a reader that reads the log into c. ready has a condition until the log is read to etcd's revision.
func New(c *cache.Cache, nc *nats.Conn, s Source, ready *lifecycle.Readiness, config Config) *Reader {
	ready.Set(eventLogCondition, errors.New("the replica is still reading it"))
	l := &Reader{
		config:          config,
		cache:           c,
		nats:            nc,
		source:          s,
		requestProgress: func() error { return nc.Publish(config.Log.Subject(eventlog.ProgressRequestSubject), nil) },
		ready:           ready,
		backfills:       newBackfills(),
		revisions:       coalesce.Group[int64]{Timeout: freshnessTimeout},
		checks:          coalesce.Group[*checked]{Limit: 1},
		replays: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "watershed_watchfanout_replays_total",
			Help: "Backfills read from the event log for watches that resume from before the ring.",
		}),
	}
	return l
}

// eventLogCondition is the name of the log's readiness condition.
const eventLogCondition = "the event log"

// Metrics are this package's collectors.
func (l *Reader) Metrics() []prometheus.Collector {
	return []prometheus.Collector{l.replays}
}

// Run starts the tasks that read the log until ctx is done. tasks restarts a task that fails.
func (l *Reader) Run(ctx context.Context, tasks *lifecycle.Supervisor) {
	tasks.Go(ctx, "verify", l.verify)
	tasks.Go(ctx, "consistency check", l.checkConsistency)
	tasks.Go(ctx, "log", func(ctx context.Context) error {
		l.cache.Restart()
		return l.config.Log.Read(ctx, l.nats, l.source.Stream, eventlog.WithDecryption(ctx, l.source.Keys, l.apply))
	})
}

// Sweep drops unused backfills.
func (l *Reader) Sweep() { l.backfills.sweep() }

// apply applies the log's next message. If that fails, it resets the message's resource, and the next reader loads it
// again.
func (l *Reader) apply(e *logv1.Event) error {
	began := time.Now()
	if err := l.tryApply(e); err != nil {
		slog.Error("Cannot apply a log message; resetting its resource", "resource", e.StorageResource,
			"revision", e.Revision)
		l.cache.Apply(
			&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: e.Revision, StorageResource: e.StorageResource},
		)
		return nil
	}
	telemetry.RecordEventSpan(e.Traceparent, "apply", began)
	return nil
}

func (l *Reader) tryApply(e *logv1.Event) (err error) {
	defer recovery.ToError("applying a message of the log", &err)
	if l.config.OnEvent != nil {
		l.config.OnEvent(e)
	}
	l.cache.Apply(e)
	return nil
}

// progressRequestDelay is how long Wait waits for the log to advance before it requests a progress message. An event
// may wait 2 ms for its batch.
const progressRequestDelay = 4 * time.Millisecond

// Wait waits until the cache has reached revision. If the log does not advance, it requests a progress message,
// because the publisher sends none by itself while nothing is written.
func (l *Reader) Wait(ctx context.Context, revision int64) error {
	pause := progressRequestDelay
	return l.cache.Wait(ctx, revision, func(ctx context.Context, advanced <-chan struct{}) {
		t := time.NewTimer(pause)
		defer t.Stop()
		select {
		case <-advanced:
		case <-ctx.Done():
		case <-t.C:
			now := time.Now()
			if last := l.progressRequestedAt.Load(); (last == nil || now.Sub(*last) > progressRequestDelay) &&
				l.progressRequestedAt.CompareAndSwap(last, &now) {
				_ = l.requestProgress() // an error is retried after the next pause
			}
			pause = min(pause*2, 100*time.Millisecond)
		}
	})
}

// waitForEtcd waits until the cache has applied a revision of etcd. epoch and progress are the cache's from before the
// revision was read. If the revision is below progress, etcd was restored from a backup: the log then begins another
// epoch first. If it does not within StaleAfter, waitForEtcd returns an UNAVAILABLE error.
func (l *Reader) waitForEtcd(ctx context.Context, revision int64, epoch string, progress int64) error {
	if revision < progress {
		if err := l.waitForNextEpoch(ctx, epoch); err != nil {
			return err
		}
	}
	return l.Wait(ctx, revision)
}

func (l *Reader) waitForNextEpoch(ctx context.Context, epoch string) error {
	stale := time.NewTimer(l.config.StaleAfter)
	defer stale.Stop()
	for {
		advanced := l.cache.Advanced()
		if l.cache.Epoch() != epoch {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-stale.C:
			return status.Error(codes.Unavailable, "etcd was restored, and the event log is of its earlier epoch")
		case <-advanced:
		}
	}
}

// Revision returns etcd's current revision.
func (l *Reader) Revision(ctx context.Context) (int64, error) { return l.source.Revision(ctx) }

// WaitUntilCurrent waits up to freshnessTimeout until the cache has applied etcd's current revision. Then it returns an
// UNAVAILABLE error, because the log of another process may not have stalled.
func (l *Reader) WaitUntilCurrent(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, freshnessTimeout)
	defer cancel()
	err := l.waitUntilCurrent(limited)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return status.Errorf(codes.Unavailable, "the event log has not delivered etcd's newest events for %v",
			freshnessTimeout)
	}
	return err
}

// waitUntilCurrent waits until the cache has applied etcd's current revision. Concurrent readers share a request for
// the revision that begins after their calls.
func (l *Reader) waitUntilCurrent(ctx context.Context) error {
	epoch, progress := l.cache.At()
	r, err := l.revisions.Get(ctx, "", func(ctx context.Context) (int64, error) {
		return rpc.Hedged(rpc.TrackReplica(ctx), rpc.HedgeDelay, l.source.Revision)
	})
	if err != nil {
		return err
	}
	return l.waitForEtcd(ctx, r, epoch, progress)
}

const (
	// freshnessTimeout is how long a read waits for a revision, as in kube-apiserver.
	freshnessTimeout = 3 * time.Second
	// stalledTimeout is how long a read waits after another read has timed out.
	stalledTimeout = 100 * time.Millisecond
	// stalledPeriod is how long stalledTimeout applies after a timeout.
	stalledPeriod = 10 * time.Second
)

// WaitUntilConsistent waits until the cache has reached etcd's revision. After a timeout, reads wait only
// stalledTimeout for the next stalledPeriod, because a stalled log would delay every read.
func (l *Reader) WaitUntilConsistent(ctx context.Context) error {
	timeout := freshnessTimeout
	if lastStall := l.stalledAt.Load(); lastStall != nil && time.Since(*lastStall) < stalledPeriod {
		timeout = stalledTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := l.waitUntilCurrent(ctx)
	switch {
	case err == nil:
		l.stalledAt.Store(nil)
	case timeout == freshnessTimeout && errors.Is(ctx.Err(), context.DeadlineExceeded):
		now := time.Now()
		l.stalledAt.Store(&now)
	}
	return err
}

// WaitUntilFresh waits up to freshnessTimeout for a revision that a client has received elsewhere. It returns
// kube-apiserver's "Too large resource version" error.
func (l *Reader) WaitUntilFresh(ctx context.Context, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, freshnessTimeout)
	defer cancel()
	if err := l.Wait(ctx, revision); err != nil {
		// k8s.io/apiserver/pkg/storage.NewTooLargeResourceVersionError
		e := apierrors.NewTimeoutError("Too large resource version: "+strconv.FormatInt(revision, 10)+", current: "+
			strconv.FormatInt(l.cache.Progress(), 10), 1)
		e.ErrStatus.Details.Causes = []metav1.StatusCause{{
			Type:    metav1.CauseTypeResourceVersionTooLarge,
			Message: "Too large resource version",
		}}
		return e
	}
	return nil
}

// Snapshot returns the objects of a resource, and loads them first if necessary. If field is not empty, the snapshot
// has an index of it.
func (l *Reader) Snapshot(ctx context.Context, r *cache.Resource, field string) (*cache.Snapshot, error) {
	return r.Snapshot(ctx, field, l.source.Rows, l.Wait)
}
