// Package log reads the event log into a replica's cache, knows how far that has come, and reads again what memory no
// longer holds.
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
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
)

// Reader is the event log as one replica reads it.
type Reader struct {
	cache        *cache.Cache
	nats         *nats.Conn
	streamReader eventlog.StreamReader
	source       registryv1.SourceClient
	dataKeys     eventlog.DataKeyFunc

	ready *lifecycle.Readiness
	// revisions are readers' questions about etcd's revision.
	revisions coalesce.Group[int64]
	// progressRequestedAt is when a publisher was last asked how far it is, in nanoseconds since 1970.
	progressRequestedAt atomic.Int64
	// stalledAt is when a read last waited for etcd's revision in vain, in nanoseconds since 1970; 0: none has since one
	// did not.
	stalledAt atomic.Int64
	freshness freshness
	backfills backfills
	replays   prometheus.Counter

	draining  chan struct{}
	drainOnce sync.Once
}

// New returns a log that is read into c. source tells etcd's revision and what a resource's objects are; ready learns
// whether the log is read as far as etcd.
func New(c *cache.Cache, nc *nats.Conn, source registryv1.SourceClient,
	ready *lifecycle.Readiness) *Reader {
	ready.Set(eventLogCondition, errors.New("it is still being read"))
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
			Help: "Watches resumed from further back than memory goes, out of the log.",
		}),
	}
}

// eventLogCondition is what the replica's readiness calls the log.
const eventLogCondition = "the event log"

// Metrics are this package's collectors.
func (l *Reader) Metrics() []prometheus.Collector { return []prometheus.Collector{l.replays} }

// Drain has every watch end.
func (l *Reader) Drain() { l.drainOnce.Do(func() { close(l.draining) }) }

// Draining is closed when watches are to end.
func (l *Reader) Draining() <-chan struct{} { return l.draining }

// Run reads the log until ctx is done, as tasks that start again when they end.
func (l *Reader) Run(ctx context.Context, tasks *lifecycle.Supervisor) {
	tasks.Go(ctx, "catch up", func(ctx context.Context) error {
		l.catchUp(ctx)
		return l.verify(ctx)
	})
	tasks.Go(ctx, "log", func(ctx context.Context) error {
		return eventlog.Read(ctx, l.nats, l.streamReader, eventlog.WithDecryption(ctx, l.dataKeys, l.apply))
	})
}

// Sweep forgets what was read again and nobody has asked for lately.
func (l *Reader) Sweep() { l.backfills.sweep() }

// apply takes the log's next message. One that breaks what holds it is forgotten with its resource, which readers bring
// back.
func (l *Reader) apply(e *logv1.Event) error {
	began := time.Now()
	if err := l.tryApply(e); err != nil {
		slog.Error("A message of the log cannot be applied; its resource is read anew", "resource", e.StorageResource,
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

// catchUpPause is how long to wait before etcd's revision is asked for again.
const catchUpPause = 200 * time.Millisecond

// catchUp waits until the replica has reached what etcd had when it started.
func (l *Reader) catchUp(ctx context.Context) {
	for ctx.Err() == nil {
		r, err := l.source.Revision(ctx, &registryv1.RevisionRequest{})
		if err == nil {
			if err = l.Wait(ctx, r.Revision); err == nil {
				l.ready.Set(eventLogCondition, nil)
				slog.Info("The event log is read to its end", "revision", r.Revision)
				return
			}
		}
		if ctx.Err() == nil {
			slog.Warn("Not caught up yet", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(catchUpPause):
			}
		}
	}
}

// progressRequestDelay is how long a reader gives the log to move by itself before it asks how far it is.
const progressRequestDelay = 2 * time.Millisecond

// Wait waits until the replica has reached revision. When nothing happens in what is stored, the publisher has to be
// asked to say so.
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

// WaitUntilCurrent waits until the replica has applied etcd's current revision. Readers share one question about it, which began
// after they had asked.
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
	// freshnessTimeout is how long a read waits for a revision that has not been reached, as kube-apiserver's.
	freshnessTimeout = 3 * time.Second
	// stalledTimeout is how long, where the log has not moved lately.
	stalledTimeout = 100 * time.Millisecond
	// stalledPeriod is for how long, until one reader is patient again.
	stalledPeriod = 10 * time.Second
)

// WaitUntilConsistent brings the replica to etcd's revision. Once that has failed it is given little time until it succeeds:
// nobody is to wait long for a log that does not move.
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

// WaitUntilFresh waits a little for a revision that a client has seen elsewhere.
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
	slog.Debug("Loaded", "resource", storageResource, "objects", len(rows), "revision", revision)
	return rows, revision, nil
}
