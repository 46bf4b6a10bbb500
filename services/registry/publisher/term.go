package publisher

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// term is one publisher's writing, from the log's last message on until something breaks.
type term struct {
	log *eventlog.Writer
	// epoch is what etcd says at EpochKey, as this publisher wrote it, and written the revision at which etcd has
	// it.
	epoch            epoch
	epochModRevision int64
	// token and nextToken are what the log says of the history's mark: what it is, and what it is about to be.
	token, nextToken string
	// transactionCompleted: a transaction has been published to its end since the log was opened.
	transactionCompleted bool
	// forceProgress: the next progress is published though nothing is new.
	forceProgress bool
}

// stamp is an event with what the log says of etcd's history.
func (w *term) stamp(e *logv1.Event) *logv1.Event {
	e.Epoch = w.epoch.ID
	if e.StorageResource == "" {
		e.FencingToken, e.NextFencingToken = w.token, w.nextToken
	}
	return e
}

func (w *term) append(e *logv1.Event) error { return w.log.Append(w.stamp(e)) }

// progress says that everything up to revision is in the log.
func (w *term) progress(revision int64) error {
	last := w.log.Last().Revision
	if revision <= last && !w.forceProgress {
		return nil
	}
	w.forceProgress = false
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
	publishedRevision.Set(float64(p.published.Load()))
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
