package watch

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// watcher is one watch stream: a cursor into the resource's events. Its states:
//
//	begin ───── watch from a revision ───────────────► resume
//	begin ───── initial events requested ────────────► initial
//	initial ─── snapshot sent, then its bookmark ────► resume
//	resume ──── position older than the ring ────────► replay
//	replay ──── one backfill piece sent ─────────────► resume
//	resume ──── position in the ring ────────────────► streaming
//	streaming ─ ring overran the cursor ─────────────► resume
//	streaming ─ owner has too many bytes in flight ──► waiting
//	waiting ─── bytes granted ───────────────────────► resume
//	any ─────── canceled, draining, stale, expired ──► ended
//
// A watcher in the state waiting holds no events. A watch whose CRD changed ends without an error.
type watcher struct {
	server    *Server
	cache     *cache.Cache
	logReader *logreader.Reader
	converter *conversion.Converter

	query       *query.Query
	request     *watchfanoutv1.WatchRequest
	stream      sender
	resource    *cache.Resource
	events      *cache.Subscription
	delivered   prometheus.Counter // of the resource
	position    events.Position
	columnsSent bool // whether the client has a Table's columns
	// wanted is the size of the event for which deliver returned errQuotaExceeded. granted releases the bytes that
	// waitForQuota has reserved for it since; nil if there are none.
	wanted  int
	granted func()
	// bookmarkDue: send a bookmark once all earlier events are sent.
	bookmarkDue bool
	// cursor is the watch's cursor and sentRevision the revision of the last event sent. The status page reads both.
	cursor, sentRevision atomic.Int64
}

func (w *watcher) run(ctx context.Context) error {
	if err := w.start(ctx); err != nil {
		return err
	}
	bookmarks := time.NewTicker(w.server.ProgressPeriod)
	defer bookmarks.Stop()
	for {
		changed, advanced, err := w.sendPending(ctx)
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-advanced:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-w.server.draining:
			return rpc.ErrDraining
		case <-bookmarks.C:
			if err := w.logReader.CheckFresh(); err != nil && w.server.ServesStale {
				return w.sendError(expired(w.position.Revision, w.cache.Progress()))
			} else if err != nil {
				return err
			}
			w.bookmarkDue = true
		}
	}
}

func (w *watcher) close() {
	w.server.untrack(w)
	w.releaseGranted()
	w.events.Close()
}

// start sends the initial events, or the events that the ring has dropped.
func (w *watcher) start(ctx context.Context) error {
	cur, err := w.begin(ctx)
	if err != nil {
		return w.sendError(w.endError(err, isResumed(w.request)))
	}
	w.cursor.Store(int64(cur))
	// The first message confirms that the stream is open and can resume from its position. It is omitted if the replica
	// has not reached that position.
	if w.position.Revision <= w.cache.Progress() {
		return w.flushPosition()
	}
	return nil
}

// sendPending sends all pending events, and a due bookmark. changed is closed when another event arrives. advanced is
// closed when the cache advances, if a bookmark waits for that.
func (w *watcher) sendPending(ctx context.Context) (changed, advanced <-chan struct{}, err error) {
	for {
		advanced = nil
		if w.bookmarkDue {
			advanced = w.cache.Advanced()
		}
		batch, next, progress, changed, ok := w.events.Next(cache.Cursor(w.cursor.Load()), batchEvents)
		if !ok { // the ring overran the cursor; the log has the events, unless it was reset
			if err := w.resumeAgain(ctx); err != nil {
				return nil, nil, err
			}
			continue
		}
		w.cursor.Store(int64(next))
		switch err := w.deliver(ctx, batch); {
		case errors.Is(err, errQuotaExceeded): // it waits without its events, because the ring may drop them meanwhile
			if err = w.waitForQuota(); err == nil {
				err = w.resumeAgain(ctx)
			}
			if err != nil {
				return nil, nil, err
			}
			continue
		case err != nil:
			return nil, nil, err
		}
		if changed == nil { // more events follow
			continue
		}
		if w.bookmarkDue && w.mayReport(progress) {
			w.bookmarkDue, advanced = false, nil
			if err := w.sendProgress(progress); err != nil {
				return nil, nil, err
			}
		}
		return changed, advanced, nil
	}
}

// resumeAgain resumes an open watch after its position.
func (w *watcher) resumeAgain(ctx context.Context) error {
	cur, err := w.resume(ctx, w.position)
	if err != nil {
		return w.sendError(w.endError(err, true))
	}
	w.cursor.Store(int64(cur))
	return nil
}

// mayReport reports whether the watch may send a revision that the cache has reached. The watch may have resumed from a
// later revision.
func (w *watcher) mayReport(progress int64) bool {
	return progress > w.position.Revision || progress == w.position.Revision && !w.server.OnlyAdvances
}

// flushPosition sends the watch's position without an event.
func (w *watcher) flushPosition() error { return (&frames{watcher: w, sendPosition: true}).flush() }

// sendProgress sends the replica's revision: as a bookmark, or as a position for the gateway if the client requested no
// bookmarks.
func (w *watcher) sendProgress(revision int64) error {
	w.setPosition(revision, events.LastIndex)
	if !w.request.AllowBookmarks {
		return w.flushPosition()
	}
	return w.bookmark(revision)
}

// setPosition records that everything up to a position has been sent.
func (w *watcher) setPosition(revision int64, index int32) {
	w.position.Revision, w.position.Index = revision, index
}

// alreadySent reports whether the watch's position is at or after an event.
func (w *watcher) alreadySent(e *cache.Event) bool {
	return e.Revision < w.position.Revision || e.Revision == w.position.Revision && e.Index <= w.position.Index
}

// deliver sends the frames of the events that the query selects. It returns errQuotaExceeded if the owner may not send
// a large event yet. The position is then at the event before it.
func (w *watcher) deliver(ctx context.Context, all []*cache.Event) error {
	out := &frames{watcher: w}
	defer out.close()
	for i, e := range all {
		if !w.query.InNamespace(e.Item) || w.alreadySent(e) {
			continue // in another namespace, or another replica has sent it
		}
		kind, item, err := w.classify(ctx, e)
		if err != nil {
			return w.endDelivery(out, err)
		}
		if kind == events.Unselected {
			continue
		}
		columns := w.columnsSent
		// The frame is as large as the object. deliver reserves its bytes before it builds the frame.
		if !w.query.Table && !w.query.Encoding.Partial {
			err = out.reserve(item.JSONSize())
		}
		var data []byte
		if err == nil {
			data, err = w.eventFrame(ctx, e, kind, item)
		}
		if err == nil && out.release == nil {
			err = out.reserve(len(data))
		}
		if errors.Is(err, errQuotaExceeded) {
			w.columnsSent = columns
			if i > 0 {
				w.advanceTo(all[i-1])
			}
		}
		if err != nil {
			return w.endDelivery(out, err)
		}
		w.setPosition(e.Revision, e.Index)
		if err := out.addEvent(data, false, e.Traceparent); err != nil {
			return err
		}
		w.sentRevision.Store(e.Revision)
		w.delivered.Inc()
		w.server.rate.count.Add(1)
	}
	return out.flush()
}

// endDelivery returns the error that ends a delivery. If registry rejects an object, a resumed watch would fail again.
// The watch then ends with an ERROR event after the earlier events.
func (w *watcher) endDelivery(out *frames, err error) error {
	var rejection conversion.Rejection
	if !errors.As(err, &rejection) {
		return err
	}
	if err := out.flush(); err != nil {
		return err
	}
	return w.sendError(rejection)
}

// sendError ends the stream with an ERROR event if err is an API error, because the client must receive that. It
// returns every other error.
func (w *watcher) sendError(err error) error {
	if errors.Is(err, errCRDChanged) {
		return sendEnd(w.stream, nil, w.resource.CRDChangedAt())
	}
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	data, err := w.query.Encoding.Error(api.Status())
	if err != nil {
		return err
	}
	return sendEnd(w.stream, data, 0)
}
