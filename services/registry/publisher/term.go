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

// term is one publisher's writing, from the log's last message on until something breaks.
type term struct {
	log *eventlog.Writer
	// history is what etcd says at HistoryKey, as this publisher wrote it, and written the revision at which etcd has
	// it.
	history history
	written int64
	// marker and nextMarker are what the log says of the history's mark: what it is, and what it is about to be.
	marker, nextMarker string
	// whole: a transaction has been published to its end since the log was opened.
	whole bool
	// forced: the next progress is published though nothing is new.
	forced bool
}

// stamp is an event with what the log says of etcd's history.
func (w *term) stamp(e *logv1.Event) *logv1.Event {
	e.History = w.history.ID
	if e.StoredAs == "" {
		e.Marker, e.NextMarker = w.marker, w.nextMarker
	}
	return e
}

func (w *term) append(e *logv1.Event) error { return w.log.Append(w.stamp(e)) }

// progress says that everything up to revision is in the log.
func (w *term) progress(revision int64) error {
	last := w.log.Last().Revision
	if revision <= last && !w.forced {
		return nil
	}
	w.forced = false
	return w.append(&logv1.Event{Revision: max(revision, last)})
}

// acknowledge notes that the log has a message.
func (p *Publisher) acknowledge(id eventlog.ID) {
	p.acknowledged.Add(1)
	for { // acknowledgements come in any order
		was := p.published.Load()
		if was >= id.Revision || p.published.CompareAndSwap(was, id.Revision) {
			break
		}
	}
	reached.Set(float64(p.published.Load()))
}

// reset starts the log anew after a revision, and says so in the log.
func (p *Publisher) reset(ctx context.Context, w *term, revision int64) error {
	resetCount.Inc()
	slog.Warn("The event log starts anew", "revision", revision, "last", w.log.Last().String())
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}); err != nil {
		return err
	}
	flushing, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := w.log.Flush(flushing); err != nil {
		return err
	}
	return errors.New("the log was reset")
}

// beginTerm reads where the log ends. An empty one is begun with a reset, and so is one of another history of etcd.
// What etcd still has of the same history comes after it: of an etcd that no log was ever made of, which is a cluster's
// that comes from kube-apiserver, and where the log alone was lost, so that watches go on.
func (p *Publisher) beginTerm(ctx context.Context) (*term, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := p.Log.Stream(ctx, p.JS)
	if err != nil {
		return nil, err
	}
	last, sequence, ok, err := eventlog.Last(ctx, stream)
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
		reason, err = p.continues(ctx, stream, last, h, revision)
	case h.ID != "":
		reason, err = p.remembers(ctx, h, revision)
	}
	if err != nil {
		return nil, err
	}
	switch same := reason == "" && h.ID != ""; {
	case same && ok:
		p.memory.history, p.memory.revision = h, last.Revision
		w.history, w.marker = h, h.Mark
		// It is written again as it is: whatever an earlier leadership has still under way is void.
		w.written, err = p.writeHistory(ctx, h, written)
		return w, err
	case same:
		return w, p.beginAgain(ctx, w, h, written, sequence)
	}
	slog.Warn("The event log begins with a history of its own", "reason", reason)
	p.published.Store(0)
	foreign := ok || h.ID != "" // what clients hold may be of the one that was
	return w, p.begin(ctx, w, written, sequence, foreign)
}

// begin begins a log of a history of its own: of what comes from now on, or of all that etcd has where there was no
// other.
func (p *Publisher) begin(ctx context.Context, w *term, written int64, sequence uint64, foreign bool) (err error) {
	h := history{ID: rand.Text(), Mark: rand.Text()}
	if h.Since, err = p.writeHistory(ctx, h, written); err != nil {
		return err
	}
	w.written = h.Since
	if !foreign {
		if h.Since, err = p.oldest(ctx, w.written); err != nil {
			return err
		}
	}
	if w.written, err = p.writeHistory(ctx, h, w.written); err != nil {
		return err
	}
	w.history, w.marker = h, h.Mark
	p.memory = memory{history: h}
	return w.restart(ctx, sequence, h.Since)
}

// beginAgain begins a log of the history that the lost one was of.
func (p *Publisher) beginAgain(ctx context.Context, w *term, h history, written int64, sequence uint64) (err error) {
	w.history, w.marker = h, h.Mark
	if w.written, err = p.writeHistory(ctx, h, written); err != nil {
		return err
	}
	start, err := p.oldest(ctx, w.written)
	if err != nil {
		return err
	}
	start = max(start, h.Since)
	slog.Warn("The event log was lost; what etcd still has goes into a new one", "after", start)
	return w.restart(ctx, sequence, start)
}

// restart begins the log after what has the stream's sequence number, with all that comes after a revision.
func (w *term) restart(ctx context.Context, sequence uint64, revision int64) error {
	w.log.Restart(sequence)
	resetCount.Inc()
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}); err != nil {
		return err
	}
	return w.log.Flush(ctx)
}

// backlog is how many revisions a log that begins goes back at most: it is behind until it has them.
const backlog = 50_000

// oldest is the first revision, of the last backlog ones up to now, that etcd can be read at: it has all events after
// it.
func (p *Publisher) oldest(ctx context.Context, now int64) (int64, error) {
	low, high := max(now-backlog, 1), now
	for low < high {
		middle := low + (high-low)/2
		_, err := p.Storage.Client.Client.Get(ctx, ElectionKey, clientv3.WithRev(middle), clientv3.WithCountOnly())
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
