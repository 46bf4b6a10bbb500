package publisher

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// beginTerm reads the end of the log and decides how the term continues it:
//
//	log has messages, etcd in the same epoch      resume: continue after the last message
//	log has messages, otherwise                   startEpoch: begin at etcd's revision
//	log lost, etcd proved unchanged               refill: begin with etcd's history
//	log lost, otherwise                           startEpoch: begin at etcd's revision
//	no log and no record, such as a cluster
//	that kube-apiserver served                    startEpoch: begin with etcd's history
//
// The checkpoint of this publisher is the proof that etcd is unchanged.
func (p *Publisher) beginTerm(ctx context.Context) (*term, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := p.Log.Stream(ctx, p.JS); err != nil {
		return nil, err
	}
	last, sequence, ok, err := eventlog.Last(ctx, p.JS)
	if err != nil {
		return nil, err
	}
	w := &term{log: eventlog.NewWriter(p.JS, p.NATS.MaxPayload(), last, p.acknowledge)}
	h, modRevision, revision, err := readEpoch(ctx, p.Storage.Client.Client)
	if err != nil {
		return nil, err
	}
	reason := "etcd has no epoch"
	switch {
	case ok:
		reason, err = p.continuesEpoch(ctx, last, h, revision)
	case h.ID != "":
		reason, err = p.matchesCheckpoint(ctx, h, modRevision, revision)
	}
	if err != nil {
		return nil, err
	}
	switch same := reason == "" && h.ID != ""; {
	case same && ok:
		return w, p.resume(ctx, w, h, modRevision)
	case same:
		return w, p.refill(ctx, w, h, modRevision, sequence)
	}
	slog.Warn("The event log starts a new epoch", "reason", reason)
	// clients may hold revisions of an earlier epoch
	otherEpoch := ok || modRevision != 0 || p.checkpoint.epoch.ID != ""
	return w, p.startEpoch(ctx, w, modRevision, sequence, otherEpoch)
}

// resume continues a log of the epoch h.
func (p *Publisher) resume(ctx context.Context, w *term, h epoch, modRevision int64) (err error) {
	if h.Since == 0 { // older releases did not write it
		h.Since = w.log.Last().Revision
	}
	w.epoch, w.token = h, h.Token
	// Writing the record again invalidates the pending transactions of an earlier term.
	if w.epochModRevision, err = p.writeEpoch(ctx, h, modRevision); err != nil {
		return err
	}
	p.checkpoint = checkpoint{epoch: h, epochModRevision: w.epochModRevision, revision: w.log.Last().Revision}
	return nil
}

// startEpoch starts an epoch and its log. The log begins at etcd's current revision if clients may hold revisions of
// another epoch (otherEpoch). Otherwise it begins with the history that etcd still has.
func (p *Publisher) startEpoch(
	ctx context.Context,
	w *term,
	modRevision int64,
	sequence uint64,
	otherEpoch bool,
) (err error) {
	h := epoch{ID: rand.Text(), Token: rand.Text()}
	if h.Since, err = p.writeEpoch(ctx, h, modRevision); err != nil { // the write returns the revision that Since needs
		return err
	}
	w.epochModRevision = h.Since
	if !otherEpoch {
		if h.Since, err = p.oldestRevision(ctx, w.epochModRevision, maxBacklog); err != nil {
			return err
		}
	}
	if w.epochModRevision, err = p.writeEpoch(ctx, h, w.epochModRevision); err != nil {
		return err
	}
	w.epoch, w.token = h, h.Token
	p.checkpoint = checkpoint{epoch: h, epochModRevision: w.epochModRevision}
	return p.restartLog(ctx, w, sequence, h.Since)
}

// refill begins a new log of the epoch h with the history that etcd still has, because the old log was lost.
func (p *Publisher) refill(ctx context.Context, w *term, h epoch, modRevision int64, sequence uint64) (err error) {
	w.epoch, w.token = h, h.Token
	if w.epochModRevision, err = p.writeEpoch(ctx, h, modRevision); err != nil {
		return err
	}
	p.checkpoint.epochModRevision = w.epochModRevision
	after, err := p.oldestRevision(ctx, w.epochModRevision, maxBacklog)
	if err != nil {
		return err
	}
	after = max(after, h.Since)
	slog.Warn("The event log was lost; it is refilled from etcd", "after", after)
	return p.restartLog(ctx, w, sequence, after)
}

// restartLog begins the log with a reset: all events after a revision follow. sequence is the stream's last sequence.
func (p *Publisher) restartLog(ctx context.Context, w *term, sequence uint64, revision int64) error {
	p.published.Store(0)
	w.log.Restart(sequence)
	resetCount.Inc()
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}); err != nil {
		return err
	}
	return w.log.Flush(ctx)
}

// maxBacklog is how many revisions a new log holds at most when it begins. Readers are behind until the publisher has
// published them.
const maxBacklog = 50_000

// maxBacklogBytes is the largest etcd that a new log is filled from. The etcd client buffers all events that are not
// published yet, and etcd does not report their size.
const maxBacklogBytes = 512 << 20

// dbSize returns the bytes in use of etcd's database, old revisions included. It is false if no member responds.
func dbSize(ctx context.Context, client *clientv3.Client) (int64, bool) {
	for _, endpoint := range client.Endpoints() {
		statusCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
		status, err := client.Status(statusCtx, endpoint)
		cancel()
		if err == nil {
			return status.DbSizeInUse, true
		}
	}
	return 0, false
}

// oldestRevision returns the oldest readable revision among the last limit revisions before now: etcd has all events
// after it. It returns now if etcd's database exceeds maxBacklogBytes.
func (p *Publisher) oldestRevision(ctx context.Context, now, limit int64) (int64, error) {
	client := p.Storage.Client.Client
	if size, ok := dbSize(ctx, client); !ok || size > maxBacklogBytes {
		return now, nil
	}
	low, high := max(now-limit, 1), now
	for low < high {
		middle := low + (high-low)/2
		_, err := client.Get(ctx, ElectionKey, clientv3.WithRev(middle), clientv3.WithCountOnly())
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			low = middle + 1
		case err != nil:
			return 0, err
		default:
			high = middle
		}
	}
	return low, nil
}
