// Package publisher writes the event log from etcd's events. A single replica at a time publishes, and holds the only
// watch that etcd serves. It is elected through etcd. A full etcd grants no lease. JetStream then rejects a second
// publisher.
//
// The publisher decodes each event once and encodes it once per media type. platform/watchcache/core decides how a term
// continues the log, and which messages follow which. This package performs its requests to etcd and NATS. It does not
// deliver events to readers: platform/eventlog and the watch tier do.
//
// Publisher.Run owns two goroutines: the election, which calls lead or leadWithoutLease, and sendTraceContexts. lead
// owns the compaction task. All other state of a term belongs to the goroutine of lead.
package publisher

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/storage"
)

// KeyPrefix returns the prefix of the own keys of an event log. Registries with different logs on the same etcd each
// elect a publisher: each log is complete by itself. id is the log of an etcd.
func KeyPrefix(log string, id eventlog.LogID) string {
	if id != eventlog.Main {
		log += "." + string(id) // no name of a log has a dot
	}
	return logsPrefix + log + "/"
}

// logsPrefix is the prefix of the own keys of all event logs.
const logsPrefix = "logs/"

// electionKey returns the etcd key of the publisher's election.
func (p *Publisher) electionKey() string {
	return p.Etcd.OwnKey(KeyPrefix(p.Log.Name, p.Log.ID) + "publisher")
}

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
		Help: "The revision of etcd up to which the log of the main etcd is complete, on the registry that publishes.",
	})
	leading = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_publisher_leading",
		Help: "1 on the registry that publishes the log of the main etcd, 0 on the others, by --log-name. Each `up` has a " +
			"log of its own.",
	}, []string{"log_name"})
)

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{publishedEvents, resetCount, rejectedEvents, failures, publishedRevision, leading}
}

// Publisher is a candidate in the election. It writes the event log while it is elected.
type Publisher struct {
	Storage *storage.Storage
	// Etcd is the etcd that the log belongs to. The log has the resources that Storage stores in it.
	Etcd     *storage.Etcd
	Log      *eventlog.Options
	NATS     *nats.Conn
	JS       jetstream.JetStream
	Identity string
	// DataKeys encrypt events whose objects are encrypted in etcd. Nil: no event is encrypted.
	DataKeys *storage.DataKeys
	// CompactionInterval is the age at which etcd revisions are compacted. 0: the publisher does not compact etcd.
	CompactionInterval time.Duration

	decryptBackoff decryptBackoff
	selections     selections
	// crds decodes custom resources as of the revision that is being published.
	crds *customresources.CRDs
	// core decides. published is its last revision in the log.
	core      core.Publisher
	published atomic.Int64
	// observed is the end of the log that this registry has read.
	observed eventlog.ObservedEnd
	// logEpoch is the epoch of the log's last progress message or reset, as read at the begin of the term.
	logEpoch string
	// traceContexts holds the trace contexts of writes whose events have not arrived. publishing is true while this
	// publisher consumes them.
	traceContexts traceContexts
	publishing    atomic.Bool
	// elected is true while this publisher is elected.
	elected atomic.Bool
	// failure is why a term has ended after the log's last acknowledgement; nil if none has.
	failure atomic.Pointer[error]
}

// wrongLastID is JetStream's error for a message whose expected message is not the last. It often follows the rejection
// of the expected message.
const wrongLastID jetstream.ErrorCode = 10070

// failed records the error of a term. The cause of a rejected message replaces the errors that follow from it.
func (p *Publisher) failed(err error) {
	if isRejected(err) {
		p.failure.CompareAndSwap(nil, &err)
		return
	}
	p.failure.Store(&err)
}

// isRejected reports whether JetStream has rejected a message because it expects another message or sequence.
func isRejected(err error) bool {
	var rejected *jetstream.APIError
	return errors.As(err, &rejected) &&
		(rejected.ErrorCode == wrongLastID || rejected.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence)
}

// isDeposed reports whether another publisher may have appended to the log. Without a lease, core.ErrEpochChanged also
// means that etcd has space again.
func isDeposed(err error) bool {
	return isRejected(err) || errors.Is(err, core.ErrEpochChanged)
}

// Failure returns why this publisher cannot publish now: an error that no acknowledgement has followed.
func (p *Publisher) Failure() error {
	if err := p.failure.Load(); err != nil && p.Elected() {
		return *err
	}
	return nil
}

// Elected reports whether this publisher writes the log.
func (p *Publisher) Elected() bool { return p.elected.Load() }

// Run takes part in the election and publishes while elected, until ctx ends. The lifecycle of a publisher:
//
//	follower ── lease acquired ──▶ leader: core.Term ──▶ publishing
//	                                       ▲                 │
//	                                       └── a pause ◀─────┤ any error; a reset after a compaction
//	leader ── lease lost, ctx done ──▶ follower
//	leader ── the stream does not respond, or has lost its end ──▶ leader with another stream
//	leader ── core.Publisher.TermFailed ──▶ follower, which pauses before the next election
//	follower ── etcd has no space, no publisher ──▶ leader without a lease
//	leader without a lease ── another publisher, or space in etcd ──▶ follower
func (p *Publisher) Run(ctx context.Context) error {
	observed, err := p.Log.ID.ServeObservedEnd(p.NATS, p.observed.End)
	if err != nil {
		return err
	}
	defer func() { _ = observed.Unsubscribe() }()
	p.setLeading(0)
	go p.sendTraceContexts(ctx)
	if p.CompactionInterval > 0 {
		ctx, cancel := context.WithCancel(ctx)
		var tasks lifecycle.Supervisor
		defer tasks.Wait()
		defer cancel()
		tasks.Go(ctx, "compaction", p.compact)
	}
	candidate := election.Candidate{
		Client:           p.Etcd.Client.Client,
		Key:              p.electionKey(),
		Identity:         p.Identity,
		Lead:             func(ctx context.Context) error { return p.lead(ctx, true) },
		LeadWithoutLease: p.leadWithoutLease,
	}
	return candidate.Run(ctx)
}

func (p *Publisher) setLeading(value float64) {
	if p.Log.ID == eventlog.Main {
		leading.WithLabelValues(p.Log.Name).Set(value)
	}
}

const (
	// probePeriod is the timeout of a probe for another publisher, and the pause after it.
	probePeriod = time.Second
	// silentAfter is how long the log has no new message before its publisher counts as lost. A live publisher appends
	// a fencing token each tokenPeriod.
	silentAfter = 3 * tokenPeriod
)

// leadWithoutLease leads while no other registry publishes. Two publishers that begin at the same time cannot fork the
// log, because JetStream rejects the later message. Its publisher waits until the other ends.
func (p *Publisher) leadWithoutLease(ctx context.Context) error {
	for {
		if err := p.awaitNoPublisher(ctx); err != nil {
			return err
		}
		if err := p.lead(ctx, false); ctx.Err() != nil || !isDeposed(err) {
			return err
		}
		_ = lifecycle.Sleep(ctx, probePeriod)
	}
}

// awaitNoPublisher returns when no registry subscribes to progress requests, or when the log has had no new message for
// silentAfter. NATS keeps the subscription of a frozen process for minutes.
func (p *Publisher) awaitNoPublisher(ctx context.Context) error {
	var last uint64
	for changed := time.Now(); time.Since(changed) < silentAfter; lifecycle.Sleep(ctx, probePeriod) {
		probe, cancel := context.WithTimeout(ctx, probePeriod)
		subject := p.Log.ID.Subject(eventlog.ProgressRequestSubject)
		_, err := p.NATS.RequestWithContext(probe, subject, nil) // a publisher receives it, and does not respond
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, nats.ErrNoResponders) {
			return nil
		}
		read, cancel := context.WithTimeout(ctx, requestTimeout)
		_, sequence, _, err := p.Log.ID.Last(read, p.JS)
		cancel()
		if err != nil || sequence != last {
			last, changed = sequence, time.Now()
		}
	}
	return nil
}

// lead publishes term after term until ctx ends, or fails if the leader must resign.
func (p *Publisher) lead(ctx context.Context, leased bool) error {
	p.setLeading(1)
	defer p.setLeading(0)
	p.core.Elected()
	p.elected.Store(true)
	defer p.elected.Store(false)
	var warned time.Time
	for pause, failed := minPause, 0; ; {
		published := p.published.Load()
		err := p.publish(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		pause = min(2*pause, maxPause)
		if p.published.Load() != published {
			pause = minPause
		}
		failures.Inc()
		p.failed(err)
		if failed++; time.Since(warned) > warnPeriod {
			slog.Warn("Publishing failed; resuming from the log's last message", "error", err, "times", failed)
			warned, failed = time.Now(), 0
		}
		if !leased && isDeposed(err) {
			return err
		}
		if errors.Is(err, errLogDeleted) || p.abandon(ctx, err) {
			p.core.Elected() // the next term has the whole time until it resigns
			continue
		}
		if p.core.TermFailed(time.Now()) {
			return fmt.Errorf("no event could be published for a while: %w", err)
		}
		if lifecycle.Sleep(ctx, pause); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// abandon deletes the stream, and returns true, if a term has ended because the stream does not respond, and the NATS
// servers do: the copies of the stream have stopped, or most of their servers are lost. The next term begins the log.
func (p *Publisher) abandon(ctx context.Context, err error) bool {
	if !errors.Is(err, eventlog.ErrUnanswered) {
		return false
	}
	abandoned, err := p.Log.Abandon(ctx, p.JS)
	switch {
	case err != nil:
		slog.Warn("The stream of the event log does not respond, and cannot be deleted", "stream", p.Log.ID.Stream(),
			"error", err)
	case abandoned:
		slog.Error("The stream of the event log is deleted: it does not respond, and NATS does",
			"stream", p.Log.ID.Stream())
	}
	return abandoned
}

// minPause is the pause after a term that has published events. After each further term, the pause is twice as long, up
// to maxPause.
const (
	minPause = 20 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

// warnPeriod is how often a failing publisher warns.
const warnPeriod = 5 * time.Second

// publish runs one term: it resumes from the log's last message and returns with the term's error.
func (p *Publisher) publish(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	log, err := p.Log.ID.NewWriter(ctx, p.JS)
	if err != nil {
		return err
	}
	p.selections = selections{} // etcd may have been restored: a revision may have another object
	if p.DataKeys != nil {
		p.DataKeys.Unconfirm() // for the same reason
	}
	t := &term{Term: p.core.Begin(rand.Text()[:8]+"-", core.Epoch{ID: rand.Text(), Token: rand.Text()}, p.encode),
		Publisher: p, log: log}
	if err := t.proceed(ctx); err != nil {
		return err
	}
	progressRequests := make(chan struct{}, 1)
	sub, err := p.NATS.Subscribe(p.Log.ID.Subject(eventlog.ProgressRequestSubject), func(*nats.Msg) {
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
		traceSub, err := p.Log.ID.SubscribeTraceContexts(p.NATS, p.traceContexts.add)
		if err != nil {
			return err
		}
		defer func() { _ = traceSub.Unsubscribe() }()
		p.publishing.Store(true)
		defer p.publishing.Store(false)
	}
	from := t.Request.Revision
	switch p.crds, err = customresources.CRDsAt(ctx, p.Storage, p.Etcd, from-1); {
	case errors.Is(err, rpctypes.ErrCompacted):
		t.Compacted()
		return t.proceed(ctx)
	case err != nil:
		return err
	}
	watch, err := watchEtcd(ctx, p.Etcd.Client.Client, p.Etcd.Prefix(), from)
	if err != nil {
		return err
	}
	return t.watch(ctx, watch, paced(ctx, progressRequests))
}

// watch publishes etcd's events and progress, and rotates the fencing token of the epoch. A receive from
// progressRequests means that a reader requested progress.
func (t *term) watch(ctx context.Context, watch *etcdWatch, progressRequests <-chan struct{}) (err error) {
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
			return ctx.Err()
		case ack := <-t.log.Acks():
			err = t.acknowledge(ack)
		case <-t.log.Due():
			err = t.log.Flush(ctx)
		case <-progressRequests:
			err = t.requestProgress(ctx, watch)
		case <-checks.C:
			err = t.checkToken(ctx)
		case <-rotations.C:
			t.Rotate(rand.Text())
		case <-idle.C:
			t.ForceProgress()
			err = t.requestProgress(ctx, watch)
		case resp, ok := <-watch.responses:
			err = t.handle(ctx, resp, ok)
			watch.room.Release(resp.size)
		}
		if err == nil {
			err = t.proceed(ctx)
		}
	}
	return err
}

// requestProgress requests a progress notification on the watch. The open batch does not wait for etcd.
func (t *term) requestProgress(ctx context.Context, watch *etcdWatch) error {
	if err := t.log.Flush(ctx); err != nil {
		return err
	}
	return watch.requestProgress()
}
