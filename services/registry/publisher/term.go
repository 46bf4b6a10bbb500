package publisher

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"time"

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

// reset starts the log anew at etcd's current revision, and says so in the log.
func (p *Publisher) reset(ctx context.Context, w *term) error {
	revision, err := p.Storage.ReadRevision(ctx)
	if err != nil {
		return err
	}
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
	if ok {
		reason, err := p.continues(ctx, stream, last, h, revision)
		if err != nil {
			return nil, err
		}
		if reason == "" && h.ID != "" {
			w.history, w.marker = h, h.Mark
			// It is written again as it is: whatever an earlier leadership has still under way is void.
			w.written, err = p.writeHistory(ctx, h, written)
			return w, err
		}
		slog.Warn("The event log begins anew: it is of another history of etcd", "reason", reason)
	}
	p.published.Store(0)
	w.history = history{ID: rand.Text(), Mark: rand.Text()}
	w.marker = w.history.Mark
	if w.written, err = p.writeHistory(ctx, w.history, written); err != nil {
		return nil, err
	}
	w.log.Restart(sequence)
	resetCount.Inc()
	if err := w.append(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: w.written}); err != nil {
		return nil, err
	}
	return w, w.log.Flush(ctx)
}
