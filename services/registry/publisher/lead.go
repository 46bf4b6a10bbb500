package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
)

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

// minPause is the pause after a term that has published events. After each further term, the pause is twice as long, up
// to maxPause.
const (
	minPause = 20 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

// warnPeriod is how often a failing publisher warns.
const warnPeriod = 5 * time.Second

// lead publishes term after term until ctx ends, or fails if the leader must resign.
func (p *Publisher) lead(ctx context.Context, leased bool) error {
	p.setLeading(1)
	defer p.setLeading(0)
	p.core.Elected()
	p.elected.Store(true)
	defer p.elected.Store(false)
	ctx, cancel := context.WithCancel(ctx)
	var tasks lifecycle.Supervisor
	defer tasks.Wait()
	defer cancel()
	tasks.Go(ctx, "replicas of the event log", p.measureReplicas)
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
		if errors.Is(err, errLogDeleted) || p.abandon(ctx, err) {
			p.core.Elected() // the next term has the whole time until it resigns
			continue
		}
		if !leased && isDeposed(err) {
			return err
		}
		if p.core.TermFailed(time.Now()) {
			return fmt.Errorf("no event could be published for a while: %w", err)
		}
		if lifecycle.Sleep(ctx, pause); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// abandon deletes the stream, and returns true, if a term has ended because the stream does not respond or rejects all
// messages, although the NATS servers respond. The copies of the stream have stopped, or most of their servers are
// lost. The next term begins the log.
func (p *Publisher) abandon(ctx context.Context, err error) bool {
	var abandoned bool
	reason := "it does not respond"
	switch {
	case errors.Is(err, eventlog.ErrUnanswered):
		abandoned, err = p.Log.Abandon(ctx, p.JS)
	case p.isStuck(ctx, err):
		reason = fmt.Sprintf("it has rejected all messages for %s", stuckAfter)
		abandoned, err = p.Log.DeleteAt(ctx, p.JS, p.stuck.created, p.stuck.sequence)
		p.stuck = stuckLog{} // if the stream stays, the next attempt is after stuckAfter
	default:
		return false
	}
	switch {
	case err != nil:
		slog.Warn("The stream of the event log cannot be deleted", "stream", p.Log.ID.Stream(), "reason", reason,
			"error", err)
	case abandoned:
		slog.Error("The stream of the event log is deleted: NATS responds, and the stream fails",
			"stream", p.Log.ID.Stream(), "reason", reason)
	}
	return abandoned
}

// stuckAfter is how long a stream may reject all messages of an elected publisher. The leader of a stream counts
// messages that the other copies never store, if they have stopped. It then expects a sequence that no publisher can
// know. It is below the time after which a publisher resigns (core.Publisher.TermFailed). Tests change it.
var stuckAfter = 6 * time.Second

// stuckGap is the longest time between two rejections of a stuck stream. Terms that end so begin again within 0.2 s.
const stuckGap = 2 * time.Second

// stuckLog is a stream that rejects messages.
type stuckLog struct {
	// created and sequence are the stream's creation and its last sequence. reason is the text of the rejection, with
	// the sequence that the stream expects.
	created  time.Time
	sequence uint64
	reason   string
	// since is the time of the first rejection, and last of the last.
	since, last time.Time
}

// isStuck records the error of a term. It returns true if all terms for stuckAfter have ended with the same rejection,
// of the same stream with the same last sequence. Another publisher would add messages.
func (p *Publisher) isStuck(ctx context.Context, err error) bool {
	var rejected *jetstream.APIError
	if !isRejected(err) || !errors.As(err, &rejected) {
		p.stuck = stuckLog{}
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stuckGap)
	defer cancel()
	stream, err := p.JS.Stream(ctx, p.Log.ID.Stream())
	if err != nil {
		p.stuck = stuckLog{}
		return false
	}
	info, now := stream.CachedInfo(), time.Now()
	next := stuckLog{info.Created, info.State.LastSeq, rejected.Description, now, now}
	s := p.stuck
	if s.created.Equal(next.created) && s.sequence == next.sequence && s.reason == next.reason &&
		now.Sub(s.last) < stuckGap {
		next.since = s.since
	}
	p.stuck = next
	return now.Sub(next.since) >= stuckAfter
}
