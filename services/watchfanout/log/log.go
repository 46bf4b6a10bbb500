// Package log reads the event log into a replica's cache, knows how far that has come, and reads again what memory no
// longer holds.
package log

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

// Log is the event log as one replica reads it.
type Log struct {
	cache  *cache.Cache
	nats   *nats.Conn
	stored eventlog.StreamReader
	source registryv1.SourceClient
	keys   eventlog.DataKeyFunc

	ready *lifecycle.Readiness
	// revisions are readers' questions about etcd's revision.
	revisions coalesce.Group[int64]
	// asking is when a publisher was last asked how far it is, in nanoseconds since 1970.
	asking atomic.Int64
	// stalled is when a read last waited for etcd's revision in vain, in nanoseconds since 1970; 0: none has since one
	// did not.
	stalled   atomic.Int64
	freshness freshness
	backfills backfills
	replays   prometheus.Counter

	draining  chan struct{}
	drainOnce sync.Once
}

// New returns a log that is read into c. source tells etcd's revision and what a resource's objects are; ready learns
// whether the log is read as far as etcd.
func New(c *cache.Cache, nc *nats.Conn, source registryv1.SourceClient,
	ready *lifecycle.Readiness) *Log {
	ready.Set(theLog, errors.New("it is still being read"))
	return &Log{
		cache:     c,
		nats:      nc,
		stored:    stored{source},
		source:    source,
		keys:      keysOf(source),
		ready:     ready,
		backfills: newBackfills(),
		revisions: coalesce.Group[int64]{Timeout: freshnessTimeout},
		draining:  make(chan struct{}),
		replays: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "watershed_watchfanout_replays_total",
			Help: "Watches resumed from further back than memory goes, out of the log.",
		}),
	}
}

// theLog is what the replica's readiness calls the log.
const theLog = "the event log"

// Metrics are this package's collectors.
func (l *Log) Metrics() []prometheus.Collector { return []prometheus.Collector{l.replays} }

// Drain has every watch end.
func (l *Log) Drain() { l.drainOnce.Do(func() { close(l.draining) }) }

// Draining is closed when watches are to end.
func (l *Log) Draining() <-chan struct{} { return l.draining }

// Run reads the log until ctx is done, as tasks that start again when they end.
func (l *Log) Run(ctx context.Context, tasks *lifecycle.Supervisor) {
	tasks.Go(ctx, "catch up", func(ctx context.Context) error {
		l.catchUp(ctx)
		return l.verify(ctx)
	})
	tasks.Go(ctx, "log", func(ctx context.Context) error {
		return eventlog.Read(ctx, l.nats, l.stored, eventlog.WithDecryption(ctx, l.keys, l.apply))
	})
}

// Sweep forgets what was read again and nobody has asked for lately.
func (l *Log) Sweep() { l.backfills.sweep() }

// apply takes the log's next message. One that breaks what holds it is forgotten with its resource, which readers bring
// back.
func (l *Log) apply(e *logv1.Event) error {
	began := time.Now()
	if err := l.tryApply(e); err != nil {
		slog.Error("A message of the log cannot be applied; its resource is read anew", "resource", e.StorageResource,
			"revision", e.Revision)
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: e.Revision, StorageResource: e.StorageResource})
		return nil
	}
	telemetry.RecordEventSpan(e.Traceparent, "apply", began)
	return nil
}

func (l *Log) tryApply(e *logv1.Event) (err error) {
	defer recovery.ToError("applying a message of the log", &err)
	l.cache.Apply(e)
	return nil
}

// catchUpPause is how long to wait before etcd's revision is asked for again.
const catchUpPause = 200 * time.Millisecond

// catchUp waits until the replica has reached what etcd had when it started.
func (l *Log) catchUp(ctx context.Context) {
	for ctx.Err() == nil {
		r, err := l.source.Revision(ctx, &registryv1.RevisionRequest{})
		if err == nil {
			if err = l.Wait(ctx, r.Revision); err == nil {
				l.ready.Set(theLog, nil)
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

// askAfter is how long a reader gives the log to move by itself before it asks how far it is.
const askAfter = 2 * time.Millisecond

// Wait waits until the replica has reached revision. When nothing happens in what is stored, the publisher has to be
// asked to say so.
func (l *Log) Wait(ctx context.Context, revision int64) error {
	pause := askAfter
	return l.cache.Wait(ctx, revision, func(ctx context.Context, advanced <-chan struct{}) {
		t := time.NewTimer(pause)
		defer t.Stop()
		select {
		case <-advanced:
		case <-ctx.Done():
		case <-t.C:
			now := time.Now().UnixNano()
			if last := l.asking.Load(); now-last > int64(askAfter) && l.asking.CompareAndSwap(last, now) {
				_ = l.nats.Publish(eventlog.ProgressRequestSubject, nil)
			}
			pause = min(pause*2, 100*time.Millisecond)
		}
	})
}

// Current waits until the replica has applied etcd's current revision. Readers share one question about it, which began
// after they had asked.
func (l *Log) Current(ctx context.Context) error {
	r, err := l.revisions.Get(ctx, "", func(ctx context.Context) (int64, error) {
		ask := func(ctx context.Context) (*registryv1.RevisionResponse, error) {
			return l.source.Revision(ctx, &registryv1.RevisionRequest{})
		}
		r, err := rpc.Hedged(rpc.TrackReplica(ctx), rpc.HedgeDelay, ask)
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
	// stalledFor is for how long, until one reader is patient again.
	stalledFor = 10 * time.Second
)

// Consistent brings the replica to etcd's revision. Once that has failed it is given little time until it succeeds:
// nobody is to wait long for a log that does not move.
func (l *Log) Consistent(ctx context.Context) error {
	patience := freshnessTimeout
	if at := l.stalled.Load(); at > 0 && time.Now().UnixNano()-at < int64(stalledFor) {
		patience = stalledTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := l.Current(ctx)
	switch {
	case err == nil:
		l.stalled.Store(0)
	case patience == freshnessTimeout && errors.Is(ctx.Err(), context.DeadlineExceeded):
		l.stalled.Store(time.Now().UnixNano())
	}
	return err
}

// Reach waits a little for a revision that a client has seen elsewhere.
func (l *Log) Reach(ctx context.Context, revision int64) error {
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
func (l *Log) Load(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error) {
	stream, err := l.source.Snapshot(ctx, &registryv1.SnapshotRequest{StorageResource: storedAs})
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
		return nil, 0, fmt.Errorf("snapshot of %s: %w", storedAs, err)
	}
	slog.Debug("Loaded", "resource", storedAs, "objects", len(rows), "revision", revision)
	return rows, revision, nil
}
