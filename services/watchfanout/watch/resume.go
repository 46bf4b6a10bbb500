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
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// resume goes on after a position, once the replica has come as far.
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
		if ok {
			return cur, nil
		}
		if err := (&frames{watcher: w, sendPosition: true}).flush(); err != nil {
			return cur, err
		}
		err := w.replay(ctx, low)
		if errors.Is(err, errQuotaExceeded) { // the piece is dropped, and read again after the waiting
			err = w.waitForQuota()
		}
		if err != nil {
			return cur, err
		}
	}
}

// rejectFutureRevision refuses a revision that etcd has not come to: a client has it from another history, of before a backup was
// restored, and would wait for what it believes to have seen.
func (w *watcher) rejectFutureRevision(ctx context.Context, revision int64) error {
	if revision <= w.cache.Progress() {
		return nil
	}
	r, err := w.server.source.Revision(ctx, &registryv1.RevisionRequest{})
	if err != nil { // nobody can say; it waits
		return nil
	}
	if revision > r.Revision {
		return expired(revision, w.cache.Progress())
	}
	return nil
}

// replay sends events that memory no longer holds, from the log: as many as a backfill has.
func (w *watcher) replay(ctx context.Context, low int64) error {
	after := w.position.Revision
	if w.position.Index != events.LastIndex {
		after-- // its transaction holds more; what was sent of it is left out
	}
	began := time.Now()
	b, leave, err := w.logReader.Backfill(ctx, w.query.Entry.StorageResource, after, low)
	slog.Debug("Replayed from the log",
		"resource", w.query.Entry.StorageResource, "after", after, "took", time.Since(began), "error", err)
	switch {
	case err != nil && ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case errors.Is(err, rpc.ErrDraining):
		return err
	case err != nil: // forgotten, or nobody could say for as long as backfillTimeout: a list is the way to go on
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
	leave() // before anything is sent: a client that takes little holds a piece, and no backfill
	for len(piece) > 0 {
		select {
		case <-w.logReader.Draining():
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
		return nil // at its place, from where it goes on with the next piece
	}
	if upTo <= after {
		return expired(w.position.Revision, low)
	}
	if upTo > w.position.Revision || upTo == w.position.Revision && w.position.Index < events.LastIndex {
		w.setPosition(upTo, events.LastIndex)
	}
	return nil
}

// advanceTo notes that everything up to an event has been sent, or is not of the query.
func (w *watcher) advanceTo(e *cache.Event) {
	if e.Revision > w.position.Revision || e.Revision == w.position.Revision && e.Index > w.position.Index {
		w.setPosition(e.Revision, e.Index)
	}
}

// piece is the next of a backfill's events that a watch sends at a time: one at least, and bound bytes at most beyond
// it. whole says that they are all.
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
	return slices.Clone(all[:n]), size, n == len(all) // a copy, which holds nothing else
}

// expired is kube-apiserver's answer to a watch from a revision that is no longer known.
func expired(revision, low int64) error {
	return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", revision, low))
}

// errCRDChanged ends a watch of a resource whose definition has changed: objects are read in another way, and clients
// begin anew.
var errCRDChanged = errors.New("the resource was defined anew")

// isResumed says whether the client has been told something already: the gateway names a place also for a watch that only
// begins at a revision.
func isResumed(r *watchfanoutv1.WatchRequest) bool {
	position := r.ResumeAfter
	return position != nil && (position.Index != events.LastIndex ||
		strconv.FormatInt(position.Revision, 10) != r.ResourceVersion)
}

// endError is why a watch cannot go on. One that was open when its resource was redefined ends without an error, as
// kube-apiserver's do.
func (w *watcher) endError(err error, open bool) error {
	if open && apierrors.IsResourceExpired(err) && w.resource.CRDChangedAt() >= w.position.Revision {
		return errCRDChanged
	}
	return err
}
