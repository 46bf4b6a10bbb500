package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

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
