// Package publisher turns etcd's events into the event log. One publisher at a time, elected through etcd, holds the
// only watch that etcd serves; it decodes each event once, encodes it once for each media type, and publishes it with
// the id of the message before, so that a publisher that lost its election without noticing can do no harm.
package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/telemetry"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/storage"
)

// ElectionKey is where publishers elect, outside of what kube-apiserver stores.
const ElectionKey = "/watershed/publisher"

// idleProgress is how often progress is published when nothing happens: well within the log's retention, so that the
// log's last message always says where to go on.
const idleProgress = 30 * time.Second

var (
	publishedEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_publisher_events_total",
		Help: "Events published to the log, by stored resource.",
	}, []string{"resource"})
	resetCount = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_resets_total",
		Help: "Times the log had to start anew: etcd had compacted what came next, or was of another history, or " +
			"the log was empty.",
	})
	rejectedEvents = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_rejected_events_total",
		Help: "Events that could not be decoded, or are too large for a message: readers are told to read the " +
			"resource anew.",
	})
)

var (
	failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_failures_total",
		Help: "Times that publishing broke off, because of NATS or etcd, and went on from the log's last message.",
	})
	publishedRevision = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_publisher_revision",
		Help: "The revision up to which the log has everything, on the registry that publishes.",
	})
	leading = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_publisher_leading",
		Help: "1 on the registry that publishes.",
	})
)

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{publishedEvents, resetCount, rejectedEvents, failures, publishedRevision, leading}
}

// Publisher publishes while it is told to.
type Publisher struct {
	Storage  *storage.Storage
	Log      *eventlog.Options
	NATS     *nats.Conn
	JS       jetstream.JetStream
	Identity string
	// DataKeys are those that events are sealed with whose objects etcd has encrypted; nil: none is.
	DataKeys *storage.DataKeys
	// CompactionInterval is how long etcd keeps old revisions; 0: somebody else compacts.
	CompactionInterval time.Duration

	decryptBackoff decryptBackoff
	// crds knows how custom resources are read at the revision that is being published.
	crds *customresources.CRDs
	// published is the revision that the log has come to; acknowledged counts the messages that it has taken.
	published, acknowledged atomic.Int64
	// traceContexts are traced writes whose events are to come, while publishes says that this publisher publishes them.
	traceContexts traceContexts
	publishing    atomic.Bool
	// checkpoint is what this publisher knows of the history that it published last, should the log be lost.
	checkpoint checkpoint
}

// Run takes part in the election and publishes when elected, until ctx ends.
func (p *Publisher) Run(ctx context.Context) error {
	go p.sendTraceContexts(ctx)
	return election.Run(
		ctx,
		p.Storage.Client.Client,
		ElectionKey,
		p.Identity,
		p.lead,
		func() { p.checkpoint = checkpoint{} },
	)
}

// resignAfter is for how long a leader may fail to publish before it lets another try, which may reach what it cannot.
const resignAfter = 8 * time.Second

func (p *Publisher) lead(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var tasks lifecycle.Supervisor
	defer tasks.Wait()
	defer cancel()
	if p.CompactionInterval > 0 {
		tasks.Go(ctx, "compaction", p.compact)
	}
	leading.Set(1)
	defer leading.Set(0)
	var failing time.Time // since when nothing has been published
	for {
		before := p.acknowledged.Load()
		err := p.publish(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		failures.Inc()
		slog.Warn("Publishing broke off; going on from the log's last message", "error", err)
		if failing.IsZero() || p.acknowledged.Load() != before {
			failing = time.Now()
		} else if time.Since(failing) > resignAfter {
			return fmt.Errorf("nothing could be published for %v: %w", time.Since(failing).Round(time.Second), err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// publish goes on from the log's last message, until something breaks.
func (p *Publisher) publish(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := p.beginTerm(ctx)
	if err != nil {
		return err
	}
	progressRequests := make(chan struct{}, 1)
	sub, err := p.NATS.Subscribe(eventlog.ProgressRequestSubject, func(*nats.Msg) {
		select {
		case progressRequests <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if telemetry.TracingEnabled() {
		traceSub, err := eventlog.SubscribeTraceContexts(p.NATS, p.traceContexts.add)
		if err != nil {
			return err
		}
		defer func() { _ = traceSub.Unsubscribe() }()
		p.publishing.Store(true)
		defer p.publishing.Store(false)
	}
	last := w.log.Last()
	from := last.Revision + 1
	if !last.Progress {
		from = last.Revision // its transaction may hold more
	}
	if p.crds, err = customresources.CRDsAt(ctx, p.Storage, from-1); err == nil {
		watch := p.Storage.Client.Watch(clientv3.WithRequireLeader(ctx), p.Storage.Prefix(), clientv3.WithPrefix(),
			clientv3.WithPrevKV(), clientv3.WithRev(from), clientv3.WithProgressNotify(), clientv3.WithFragment())
		err = p.watch(ctx, w, watch, paced(ctx, progressRequests))
	}
	compacted := errors.Is(err, rpctypes.ErrCompacted)
	if !compacted && !errors.Is(err, errPrevCompacted) {
		return err
	}
	after, err := p.Storage.ReadRevision(ctx)
	if err != nil {
		return err
	}
	if compacted { // some of what follows may still be there
		if after, err = p.oldestRevision(ctx, after, maxBacklog); err != nil {
			return err
		}
	}
	return p.reset(ctx, w, after)
}

// watch publishes what etcd's one watch says, how far that is, and the marks of etcd's history. asked tells that a
// reader wants to know how far it is.
func (p *Publisher) watch(
	ctx context.Context,
	w *term,
	watch clientv3.WatchChan,
	progressRequests <-chan struct{},
) (err error) {
	idle, rotations, checks := time.NewTicker(
		idleProgress,
	), time.NewTicker(
		tokenPeriod,
	), time.NewTicker(
		tokenCheckPeriod,
	)
	defer idle.Stop()
	defer rotations.Stop()
	defer checks.Stop()
	for err == nil {
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case err = <-w.log.Failed():
		case <-progressRequests:
			err = p.requestProgress(ctx)
		case <-checks.C:
			err = p.withTimeout(ctx, w, p.checkToken)
		case <-rotations.C:
			err = p.withTimeout(ctx, w, p.rotateToken)
		case <-idle.C:
			w.forceProgress = true
			err = p.requestProgress(ctx)
		case resp, ok := <-watch:
			if !ok {
				return errors.New("etcd ended the watch")
			}
			err = p.handle(ctx, w, resp)
		}
	}
	return err
}

// requestProgress has etcd say on the watch how far it is: the stream is the one of the same metadata.
func (p *Publisher) requestProgress(ctx context.Context) error {
	return p.Storage.Client.RequestProgress(clientv3.WithRequireLeader(ctx))
}

// withTimeout bounds what is asked of etcd and NATS between two events.
func (p *Publisher) withTimeout(ctx context.Context, w *term, fn func(context.Context, *term) error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return fn(ctx, w)
}
