// Package publisher writes the event log from etcd's events. A single replica at a time publishes, and holds the only
// watch that etcd serves. It is elected through etcd. A full etcd grants no lease. JetStream then rejects a second
// publisher.
//
// The publisher decodes each event once and encodes it once per media type. platform/watchcache/core decides how a term
// continues the log, and which messages follow which. This package performs its requests to etcd and NATS. It does not
// deliver events to readers: platform/eventlog and the watch tier do.
//
// Publisher.Run owns three goroutines: the election, which calls lead or leadWithoutLease, sendTraceContexts, and the
// compaction task. lead owns the task that measures the log's replicas. All other state of a term belongs to the
// goroutine of lead.
package publisher

import (
	"context"
	"crypto/rand"
	"errors"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
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
	// traceContexts holds the trace contexts of writes whose events have not arrived. publishing is true while this
	// publisher consumes them.
	traceContexts traceContexts
	publishing    atomic.Bool
	// elected is true while this publisher is elected.
	elected atomic.Bool
	// stuck is the state of a stream that rejects messages. Only the goroutine of lead uses it.
	stuck stuckLog
	// failure is why a term has ended after the log's last acknowledgement; nil if none has.
	failure atomic.Pointer[error]
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
	observed, err := p.Log.ID.ServeObservedEnds(p.NATS, p.observed.Ends)
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
