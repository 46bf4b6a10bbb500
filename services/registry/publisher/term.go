package publisher

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// term is the state of one attempt to publish. It begins at the log's last message and ends with the first error:
//
//	beginTerm ──▶ resume, refill or startEpoch ──▶ watch ──▶ ended
//	                                                 │         ▲
//	                                  etcd compacted └─ reset ─┘
//
// A term is used by one goroutine. Only acknowledge runs in others.
type term struct {
	log *eventlog.Writer
	// epoch is the record at EpochKey as this publisher wrote it. epochModRevision is its mod revision.
	epoch            epoch
	epochModRevision int64
	// token and nextToken are the fencing tokens in the log's progress messages: the current token, and the next if a
	// rotation is under way.
	token, nextToken string
	// transactionCompleted: a whole transaction was published since the term began.
	transactionCompleted bool
	// forceProgress: the next progress is published even if the revision is unchanged.
	forceProgress bool
}

// stamp sets the epoch of an event, and the tokens if it is a progress message or a reset of all resources.
func (w *term) stamp(e *logv1.Event) *logv1.Event {
	e.Epoch = w.epoch.ID
	if e.StorageResource == "" {
		e.FencingToken, e.NextFencingToken = w.token, w.nextToken
	}
	return e
}

func (w *term) append(e *logv1.Event) error { return w.log.Append(w.stamp(e)) }

// progress publishes that the log is complete up to revision.
func (w *term) progress(revision int64) error {
	last := w.log.Last().Revision
	if revision <= last && !w.forceProgress {
		return nil
	}
	w.forceProgress = false
	return w.append(&logv1.Event{Revision: max(revision, last)})
}

// acknowledge records that JetStream has stored a message.
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

// reset publishes a reset of all resources after a revision. It always returns an error, which ends the term.
func (p *Publisher) reset(ctx context.Context, w *term, revision int64) error {
	resetCount.Inc()
	slog.Warn("The event log is reset", "revision", revision, "last", w.log.Last().String())
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
