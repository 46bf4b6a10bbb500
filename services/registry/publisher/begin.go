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
	h, written, revision, err := readHistory(ctx, p.Storage.Client.Client)
	if err != nil {
		return nil, err
	}
	reason := "there was none"
	switch {
	case ok:
		reason, err = p.continues(ctx, last, h, revision)
	case h.ID != "":
		reason, err = p.remembers(ctx, h, written, revision)
	}
	if err != nil {
		return nil, err
	}
	switch same := reason == "" && h.ID != ""; {
	case same && ok:
		return w, p.goOn(ctx, w, h, written)
	case same:
		return w, p.refill(ctx, w, h, written, sequence)
	}
	slog.Warn("The event log begins with a history of its own", "reason", reason)
	// what clients hold may be of a history that was
	foreign := ok || written != 0 || p.memory.history.ID != ""
	return w, p.begin(ctx, w, written, sequence, foreign)
}

// goOn goes on with a log of the history h.
func (p *Publisher) goOn(ctx context.Context, w *term, h history, written int64) (err error) {
	if h.Since == 0 { // as older releases wrote it
		h.Since = w.log.Last().Revision
	}
	w.history, w.marker = h, h.Mark
	// It is written again: whatever an earlier leadership has still under way is void.
	if w.written, err = p.writeHistory(ctx, h, written); err != nil {
		return err
	}
	p.memory = memory{history: h, written: w.written, revision: w.log.Last().Revision}
	return nil
}

// begin begins a log of a history of its own: of what comes from now on or, unless another's revisions may be about, of
// all that etcd has.
func (p *Publisher) begin(ctx context.Context, w *term, written int64, sequence uint64, foreign bool) (err error) {
	h := history{ID: rand.Text(), Mark: rand.Text()}
	if h.Since, err = p.writeHistory(ctx, h, written); err != nil { // only now it is known when that is
		return err
	}
	w.written = h.Since
	if !foreign {
		if h.Since, err = p.oldest(ctx, w.written, backlog); err != nil {
			return err
		}
	}
	if w.written, err = p.writeHistory(ctx, h, w.written); err != nil {
		return err
	}
	w.history, w.marker = h, h.Mark
	p.memory = memory{history: h, written: w.written}
	return p.restart(ctx, w, sequence, h.Since)
}

// refill begins a log of the history that the lost one was of.
func (p *Publisher) refill(ctx context.Context, w *term, h history, written int64, sequence uint64) (err error) {
	w.history, w.marker = h, h.Mark
	if w.written, err = p.writeHistory(ctx, h, written); err != nil {
		return err
	}
	p.memory.written = w.written
	after, err := p.oldest(ctx, w.written, backlog)
	if err != nil {
		return err
	}
	after = max(after, h.Since)
	slog.Warn("The event log was lost; what etcd still has goes into a new one", "after", after)
	return p.restart(ctx, w, sequence, after)
}

// restart has the log's first message be that everything after a revision follows. sequence is the stream's.
func (p *Publisher) restart(ctx context.Context, w *term, sequence uint64, revision int64) error {
	p.published.Store(0)
	w.log.Restart(sequence)
	resetCount.Inc()
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}); err != nil {
		return err
	}
	return w.log.Flush(ctx)
}

// backlog is how many revisions a log that begins goes back at most: it is behind until it has them.
const backlog = 50_000

// backlogBytes is how large an etcd may be for that: its client holds all that has come and is not published yet, and
// how much that is nothing tells.
const backlogBytes = 512 << 20

// sizeOf is how many bytes etcd uses, old revisions and all; false where no member says.
func sizeOf(ctx context.Context, client *clientv3.Client) (int64, bool) {
	for _, endpoint := range client.Endpoints() {
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		status, err := client.Status(one, endpoint)
		cancel()
		if err == nil {
			return status.DbSizeInUse, true
		}
	}
	return 0, false
}

// oldest is the first revision, of the last most ones up to now, that etcd can be read at: it has all events after it.
// It is now where the events may be too many bytes.
func (p *Publisher) oldest(ctx context.Context, now, most int64) (int64, error) {
	client := p.Storage.Client.Client
	if size, ok := sizeOf(ctx, client); !ok || size > backlogBytes {
		return now, nil
	}
	low, high := max(now-most, 1), now
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
