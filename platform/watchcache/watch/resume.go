package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// resume returns the cursor after a position. It replays events that the ring has dropped.
func (w *watcher) resume(ctx context.Context, after events.Position) (cache.Cursor, error) {
	w.setPosition(after.Revision, after.Index)
	if w.position.Epoch = after.Epoch; after.Epoch == "" {
		w.position.Epoch = w.cache.Epoch()
		if err := w.rejectFutureRevision(ctx, after.Revision); err != nil {
			return 0, err
		}
	}
	for {
		cur, low, ok := w.events.After(w.position.Revision, w.position.Index)
		if h := w.cache.Epoch(); h != "" && w.position.Epoch != "" && h != w.position.Epoch {
			return 0, expired(w.position.Revision, low)
		}
		if w.events.Differed(w.position.Revision) { // the client may have wrong objects
			return 0, expired(w.position.Revision, low)
		}
		if ok {
			return cur, nil
		}
		if err := w.flushPosition(); err != nil {
			return cur, err
		}
		err := w.replay(ctx, low)
		if errors.Is(err, errQuotaExceeded) { // the piece is dropped; the next replay reads it again
			err = w.waitForQuota()
		}
		if err != nil {
			return cur, err
		}
	}
}

// rejectFutureRevision returns 410 Expired if etcd has not reached a revision. The client has such a revision from
// before a backup was restored, and would wait for events that never come.
func (w *watcher) rejectFutureRevision(ctx context.Context, revision int64) error {
	if revision <= w.cache.Progress() {
		return nil
	}
	current, err := w.logReader.Revision(ctx)
	if err != nil { // etcd's revision is unknown: the watch waits
		return nil
	}
	if revision > current {
		return expired(revision, w.cache.Progress())
	}
	return nil
}

// replay sends events that the ring has dropped: one piece of a backfill of the log.
func (w *watcher) replay(ctx context.Context, low int64) error {
	after := w.position.Revision
	if w.position.Index != events.LastIndex {
		after-- // the transaction has more events; deliver skips those already sent
	}
	began := time.Now()
	b, leave, err := w.logReader.Backfill(ctx, w.server.draining, w.query.Entry.StorageResource,
		w.position.Epoch, after, low)
	slog.Debug("Replayed from the log",
		"resource", w.query.Entry.StorageResource, "after", after, "took", time.Since(began), "error", err)
	switch {
	case err != nil && ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case errors.Is(err, rpc.ErrDraining):
		return err
	// The log has expired, or was unreadable for backfillTimeout: the client must list again.
	case err != nil:
		return expired(w.position.Revision, low)
	}
	bound := backfillPiece
	if w.server.pieces.Load() > piecesBytes {
		bound = smallPiece
	}
	piece, bytes, complete := w.piece(b.Events, bound)
	w.server.pieces.Add(int64(bytes))
	defer w.server.pieces.Add(-int64(bytes))
	upTo := b.UpTo
	leave() // before anything is sent: a slow client holds a piece, not a backfill
	for len(piece) > 0 {
		select {
		case <-w.server.draining:
			return rpc.ErrDraining
		default:
		}
		n := min(len(piece), batchEvents)
		if err := w.deliver(ctx, piece[:n]); err != nil {
			return err
		}
		w.advanceTo(piece[n-1])
		piece = piece[n:]
	}
	if !complete {
		return nil // the position is at the piece's end, where the next piece begins
	}
	if upTo <= after {
		return expired(w.position.Revision, low)
	}
	if upTo > w.position.Revision || upTo == w.position.Revision && w.position.Index < events.LastIndex {
		w.setPosition(upTo, events.LastIndex)
	}
	return nil
}

// advanceTo records that everything up to an event has been sent or is not selected by the query.
func (w *watcher) advanceTo(e *cache.Event) {
	if e.Revision > w.position.Revision || e.Revision == w.position.Revision && e.Index > w.position.Index {
		w.setPosition(e.Revision, e.Index)
	}
}

// piece returns the next events of a backfill to send: at least one event, and further events up to bound bytes.
// complete reports whether the backfill has no more events.
func (w *watcher) piece(all []*cache.Event, bound int) (piece []*cache.Event, size int, complete bool) {
	for len(all) > 0 && w.alreadySent(all[0]) {
		all = all[1:]
	}
	n := 0
	for ; n < len(all); n++ {
		next := all[n].Size()
		if n > 0 && size+next > bound {
			break
		}
		size += next
	}
	return slices.Clone(all[:n]), size, n == len(all) // a copy, so that the backfill can be freed
}

// expired returns kube-apiserver's error for a watch from a revision that is no longer available.
func expired(revision, low int64) error {
	return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", revision, low))
}

// errCRDChanged ends a watch of a resource whose CRD has changed. Objects are converted differently from then on, so
// clients must list again.
var errCRDChanged = errors.New("the resource's CRD has changed")

// isResumed reports whether the client has received anything on this watch. The gateway sets ResumeAfter also for a
// watch that only starts at a revision. A gateway of an older release does not set Open.
func isResumed(r *watchfanoutv1.WatchRequest) bool {
	position := r.ResumeAfter
	return r.Open || position != nil && (position.Index != events.LastIndex ||
		strconv.FormatInt(position.Revision, 10) != r.ResourceVersion)
}

// endError maps the reason that a watch cannot continue. A watch that was open when its CRD changed ends without an
// error, as in kube-apiserver.
func (w *watcher) endError(err error, open bool) error {
	if open && apierrors.IsResourceExpired(err) && w.resource.CRDChangedAt() >= w.position.Revision {
		return errCRDChanged
	}
	return err
}
