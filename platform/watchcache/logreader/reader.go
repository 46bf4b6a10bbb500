// Package logreader reads the event log into a replica's cache, compares its revision with etcd's, and reads events
// again that the rings no longer hold. It does not serve clients.
//
// Run starts two tasks: one applies the log to the cache, and one catches up and then verifies. Each backfill has a
// goroutine of its own.
package logreader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
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
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Reader reads the event log for one replica.
type Reader struct {
	cache        *cache.Cache
	nats         *nats.Conn
	streamReader eventlog.StreamReader
	source       registryv1.SourceClient
	dataKeys     eventlog.DataKeyFunc

	ready *lifecycle.Readiness
	// revisions shares concurrent requests for etcd's revision.
	revisions coalesce.Group[int64]
	// progressRequestedAt is when the replica last requested a progress message, in nanoseconds since 1970.
	progressRequestedAt atomic.Int64
	// stalledAt is when a read last timed out waiting for etcd's revision, in nanoseconds since 1970. A successful read
	// sets it to 0.
	stalledAt atomic.Int64
	freshness freshness
	backfills backfills
	replays   prometheus.Counter

	draining  chan struct{}
	drainOnce sync.Once
}

// New returns a reader that reads the log into c. source returns etcd's revision and a resource's objects. ready has a
// condition until the log is read to etcd's revision.
func New(c *cache.Cache, nc *nats.Conn, source registryv1.SourceClient,
	ready *lifecycle.Readiness) *Reader {
	ready.Set(eventLogCondition, errors.New("the replica is still reading it"))
	return &Reader{
		cache:        c,
		nats:         nc,
		streamReader: streamReader{source},
		source:       source,
		dataKeys:     newDataKeyFunc(source),
		ready:        ready,
		backfills:    newBackfills(),
		revisions:    coalesce.Group[int64]{Timeout: freshnessTimeout},
		draining:     make(chan struct{}),
		replays: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "watershed_watchfanout_replays_total",
			Help: "Backfills read from the event log for watches that resume from before the ring.",
		}),
	}
}

// eventLogCondition is the name of the log's readiness condition.
const eventLogCondition = "the event log"

// Metrics are this package's collectors.
func (l *Reader) Metrics() []prometheus.Collector { return []prometheus.Collector{l.replays} }

// Drain ends every watch.
func (l *Reader) Drain() { l.drainOnce.Do(func() { close(l.draining) }) }

// Draining returns a channel that Drain closes.
func (l *Reader) Draining() <-chan struct{} { return l.draining }

// Run starts the tasks that read the log until ctx is done. tasks restarts a task that fails.
func (l *Reader) Run(ctx context.Context, tasks *lifecycle.Supervisor) {
	tasks.Go(ctx, "catch up", func(ctx context.Context) error {
		l.catchUp(ctx)
		return l.verify(ctx)
	})
	tasks.Go(ctx, "log", func(ctx context.Context) error {
		return eventlog.Read(ctx, l.nats, l.streamReader, eventlog.WithDecryption(ctx, l.dataKeys, l.apply))
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
	l.cache.Apply(e)
	return nil
}

// catchUpPause is the pause before catchUp retries.
const catchUpPause = 200 * time.Millisecond

// catchUp waits until the replica has reached the revision that etcd had at the start. The replica is then ready.
func (l *Reader) catchUp(ctx context.Context) {
	for ctx.Err() == nil {
		r, err := l.source.Revision(ctx, &registryv1.RevisionRequest{})
		if err == nil {
			if err = l.Wait(ctx, r.Revision); err == nil {
				l.ready.Set(eventLogCondition, nil)
				slog.Info("Read the event log to its end", "revision", r.Revision)
				return
			}
		}
		if ctx.Err() == nil {
			slog.Warn("Cannot catch up with etcd yet", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(catchUpPause):
			}
		}
	}
}

// progressRequestDelay is how long Wait waits for the log to advance before it requests a progress message.
const progressRequestDelay = 2 * time.Millisecond

// Wait waits until the replica has reached revision. If the log does not advance, it requests a progress message,
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
			now := time.Now().UnixNano()
			if last := l.progressRequestedAt.Load(); now-last > int64(progressRequestDelay) &&
				l.progressRequestedAt.CompareAndSwap(last, now) {
				_ = l.nats.Publish(eventlog.ProgressRequestSubject, nil)
			}
			pause = min(pause*2, 100*time.Millisecond)
		}
	})
}

// WaitUntilCurrent waits until the replica has applied etcd's current revision. Concurrent readers share a request for
// the revision that begins after their calls.
func (l *Reader) WaitUntilCurrent(ctx context.Context) error {
	r, err := l.revisions.Get(ctx, "", func(ctx context.Context) (int64, error) {
		getRevision := func(ctx context.Context) (*registryv1.RevisionResponse, error) {
			return l.source.Revision(ctx, &registryv1.RevisionRequest{})
		}
		r, err := rpc.Hedged(rpc.TrackReplica(ctx), rpc.HedgeDelay, getRevision)
		return r.GetRevision(), err
	})
	if err != nil {
		return err
	}
	return l.Wait(ctx, r)
}

const (
	// freshnessTimeout is how long a read waits for a revision, as in kube-apiserver.
	freshnessTimeout = 3 * time.Second
	// stalledTimeout is how long a read waits after another read has timed out.
	stalledTimeout = 100 * time.Millisecond
	// stalledPeriod is how long stalledTimeout applies after a timeout.
	stalledPeriod = 10 * time.Second
)

// WaitUntilConsistent waits until the replica has reached etcd's revision. After a timeout, reads wait only
// stalledTimeout for the next stalledPeriod, because a stalled log would delay every read.
func (l *Reader) WaitUntilConsistent(ctx context.Context) error {
	timeout := freshnessTimeout
	if lastStall := l.stalledAt.Load(); lastStall > 0 && time.Now().UnixNano()-lastStall < int64(stalledPeriod) {
		timeout = stalledTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := l.WaitUntilCurrent(ctx)
	switch {
	case err == nil:
		l.stalledAt.Store(0)
	case timeout == freshnessTimeout && errors.Is(ctx.Err(), context.DeadlineExceeded):
		l.stalledAt.Store(time.Now().UnixNano())
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

// Load reads a whole resource from registry.
func (l *Reader) Load(ctx context.Context, storageResource string) ([]*registryv1.Row, int64, error) {
	stream, err := l.source.Snapshot(ctx, &registryv1.SnapshotRequest{StorageResource: storageResource})
	if err != nil {
		return nil, 0, err
	}
	var rows []*registryv1.Row
	var revision int64
	err = rpc.Each(stream, func(chunk *registryv1.SnapshotChunk) error {
		revision = chunk.Revision
		rows = append(rows, chunk.Rows...)
		return nil
	})
	if err != nil {
		return nil, 0, fmt.Errorf("snapshot of %s: %w", storageResource, err)
	}
	slog.Debug("Loaded a resource", "resource", storageResource, "objects", len(rows), "revision", revision)
	return rows, revision, nil
}
