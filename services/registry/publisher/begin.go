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

// beginTerm reads where the log ends and goes on from there. A log that is lost is refilled with what etcd still has,
// where this publisher can prove that etcd is as it was; else one begins: with etcd's past where there never was one,
// as on a cluster that comes from kube-apiserver, and from now on otherwise.
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
	reason := "there was none"
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
	slog.Warn("The event log begins with a history of its own", "reason", reason)
	// what clients hold may be of a history that was
	otherEpoch := ok || modRevision != 0 || p.checkpoint.epoch.ID != ""
	return w, p.startEpoch(ctx, w, modRevision, sequence, otherEpoch)
}

// resume goes on with a log of the history h.
func (p *Publisher) resume(ctx context.Context, w *term, h epoch, modRevision int64) (err error) {
	if h.Since == 0 { // as older releases wrote it
		h.Since = w.log.Last().Revision
	}
	w.epoch, w.token = h, h.Token
	// It is written again: whatever an earlier leadership has still under way is void.
	if w.epochModRevision, err = p.writeEpoch(ctx, h, modRevision); err != nil {
		return err
	}
	p.checkpoint = checkpoint{epoch: h, epochModRevision: w.epochModRevision, revision: w.log.Last().Revision}
	return nil
}

// startEpoch begins a log of a history of its own: of what comes from now on or, unless another's revisions may be about, of
// all that etcd has.
func (p *Publisher) startEpoch(
	ctx context.Context,
	w *term,
	modRevision int64,
	sequence uint64,
	otherEpoch bool,
) (err error) {
	h := epoch{ID: rand.Text(), Token: rand.Text()}
	if h.Since, err = p.writeEpoch(ctx, h, modRevision); err != nil { // only now it is known when that is
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

// refill begins a log of the history that the lost one was of.
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
	slog.Warn("The event log was lost; what etcd still has goes into a new one", "after", after)
	return p.restartLog(ctx, w, sequence, after)
}

// restartLog has the log's first message be that everything after a revision follows. sequence is the stream's.
func (p *Publisher) restartLog(ctx context.Context, w *term, sequence uint64, revision int64) error {
	p.published.Store(0)
	w.log.Restart(sequence)
	resetCount.Inc()
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}); err != nil {
		return err
	}
	return w.log.Flush(ctx)
}

// maxBacklog is how many revisions a log that begins goes back at most: it is behind until it has them.
const maxBacklog = 50_000

// maxBacklogBytes is how large an etcd may be for that: its client holds all that has come and is not published yet, and
// how much that is nothing tells.
const maxBacklogBytes = 512 << 20

// dbSize is how many bytes etcd uses, old revisions and all; false where no member says.
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

// oldestRevision is the first revision, of the last most ones up to now, that etcd can be read at: it has all events after it.
// It is now where the events may be too many bytes.
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
