// Package publisher writes the event log from etcd's events. One replica at a time publishes: it is elected through
// etcd and holds the only watch that etcd serves.
//
// The publisher decodes each event once and encodes it once per media type. It publishes each message with the expected
// ID of the previous message, so JetStream refuses a publisher that lost its election without noticing. The package
// does not deliver events to readers: platform/eventlog and the watch tier do.
//
// Publisher.Run owns two goroutines: the election, which calls lead, and sendTraceContexts. lead owns the compaction
// task. All other state of a term belongs to the goroutine of lead.
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

// ElectionKey is the etcd key of the publisher's election. It is outside of kube-apiserver's prefix.
const ElectionKey = "/watershed/publisher"

// idleProgress is the interval of progress messages while etcd has no events. It is far below the log's retention, so
// the last message of the log always holds a revision to resume from.
const idleProgress = 30 * time.Second

var (
	publishedEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_publisher_events_total",
		Help: "Events published to the log, by stored resource.",
	}, []string{"resource"})
	resetCount = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_resets_total",
		Help: "Resets of the whole log: etcd had compacted the next revision, etcd was in another epoch, or the log " +
			"was empty.",
	})
	rejectedEvents = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_rejected_events_total",
		Help: "Events that could not be decoded, or are too large for a message. Each resets its resource: readers " +
			"list it again.",
	})
)

var (
	failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_failures_total",
		Help: "Terms that an error of NATS or etcd ended. The next term resumes from the log's last message.",
	})
	publishedRevision = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_publisher_revision",
		Help: "The revision up to which the log is complete, on the registry that publishes.",
	})
	leading = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_publisher_leading",
		Help: "1 on the registry that publishes.",
	})
)

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{publishedEvents, resetCount, rejectedEvents, failures, publishedRevision, leading}
}

// Publisher is a candidate in the election. It writes the event log while it is elected.
type Publisher struct {
	Storage  *storage.Storage
	Log      *eventlog.Options
	NATS     *nats.Conn
	JS       jetstream.JetStream
	Identity string
	// DataKeys encrypt events whose objects are encrypted in etcd. Nil: no event is encrypted.
	DataKeys *storage.DataKeys
	// CompactionInterval is the age at which etcd revisions are compacted. 0: the publisher does not compact etcd.
	CompactionInterval time.Duration

	decryptBackoff decryptBackoff
	// crds decodes custom resources as of the revision that is being published.
	crds *customresources.CRDs
	// published is the last revision in the log. acknowledged counts the messages that JetStream has acknowledged.
	published, acknowledged atomic.Int64
	// traceContexts holds the trace contexts of writes whose events have not arrived. publishing is true while this
	// publisher consumes them.
	traceContexts traceContexts
	publishing    atomic.Bool
	// checkpoint identifies the last published state of etcd, for the case that the log is lost.
	checkpoint checkpoint
}

// Run takes part in the election and publishes while elected, until ctx ends. The lifecycle of a publisher:
//
//	follower ── lease acquired ──▶ leader: beginTerm ──▶ publishing
//	                                       ▲                 │
//	                                       └── 200 ms ◀──────┤ any error; a reset after a compaction
//	leader ── lease lost, ctx done ──▶ follower
//	leader ── no acknowledgement for resignAfter ──▶ follower, which pauses before the next election
//	follower ── sees another leader ──▶ follower with an empty checkpoint
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

// resignAfter is how long a leader may fail to publish before it resigns. Another replica may reach NATS and etcd.
const resignAfter = 8 * time.Second

// lead publishes term after term until ctx ends, or fails if the leader must resign.
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
	var failing time.Time // when the first failure without an acknowledgement since happened
	for {
		before := p.acknowledged.Load()
		err := p.publish(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		failures.Inc()
		slog.Warn("Publishing failed; resuming from the log's last message", "error", err)
		if failing.IsZero() || p.acknowledged.Load() != before {
			failing = time.Now()
		} else if time.Since(failing) > resignAfter {
			return fmt.Errorf("no event could be published for %v: %w", time.Since(failing).Round(time.Second), err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// publish runs one term: it resumes from the log's last message and returns with the term's error.
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
		from = last.Revision // the log may lack the rest of its transaction
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
	if compacted { // etcd may still have later revisions
		if after, err = p.oldestRevision(ctx, after, maxBacklog); err != nil {
			return err
		}
	}
	return p.reset(ctx, w, after)
}

// watch publishes etcd's events and progress, and rotates the fencing token of the epoch. A receive from
// progressRequests means that a reader requested progress.
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

// requestProgress requests a progress notification on the watch. etcd finds the stream by the metadata of ctx, so the
// metadata must be as in publish.
func (p *Publisher) requestProgress(ctx context.Context) error {
	return p.Storage.Client.RequestProgress(clientv3.WithRequireLeader(ctx))
}

// withTimeout bounds the requests to etcd and NATS between two events.
func (p *Publisher) withTimeout(ctx context.Context, w *term, fn func(context.Context, *term) error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return fn(ctx, w)
}
