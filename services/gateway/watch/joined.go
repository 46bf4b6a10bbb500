package watch

import (
	"context"
	"time"

	"watershed.dev/platform/watchcache/core"
)

// runJoined makes the watch a receiver of the broadcast of its query until it becomes unsynced, ends or is parked.
func (w *clientWatch) runJoined(ctx context.Context) (err error) {
	if w.receiver == nil {
		if err := w.join(ctx); err != nil {
			return err
		}
	}
	parked := false
	defer func() {
		if !parked {
			w.leaveBroadcast()
		}
	}()
	if !w.permitted(ctx) { // events may have waited since a revocation
		return errDone
	}
	for {
		parts, err := w.broadcast.next(w.receiver)
		if err != nil {
			return err
		}
		if len(parts) > 0 {
			if err := w.writePending(ctx, parts...); err != nil {
				return err
			}
		}
		again, err := w.due(ctx)
		switch {
		case err != nil:
			return err
		case again || len(parts) > 0 || w.detach():
			continue
		case w.detached:
			if parked = w.park(); parked {
				return errParked
			}
			continue
		}
		select {
		case <-w.woken:
		case <-ctx.Done():
		case <-w.Stopping:
		case <-w.policyChanged:
		}
	}
}

// join makes the watch a receiver of the broadcast of its query.
func (w *clientWatch) join(ctx context.Context) error {
	if !w.mayJoin() {
		return core.ErrUnsynced
	}
	if !w.place.Reached && !w.hub.revisionExists(ctx, w.key, w.Log, w.place.Position()) {
		return core.ErrUnsynced // the watch's own stream returns the tier's error
	}
	b, rcv := w.hub.joinBroadcast(w.key, w, w.place.Position())
	if rcv == nil {
		return core.ErrUnsynced
	}
	w.broadcast, w.receiver, w.lastBookmark = b, rcv, false
	w.sendHeaders()
	w.hijack(ctx)
	b.mu.Lock()
	rcv.stream, rcv.Direct, rcv.AllowBookmarks = w.stream, w.stream != nil, w.AllowBookmarks
	rcv.BookmarkPeriod, rcv.NextBookmark = w.BookmarkPeriod, w.place.NextBookmark
	rcv.limiter = w.limiter
	rcv.gzip = w.gzip
	b.mu.Unlock()
	w.hub.wakeups.set(w, w.Deadline.Add(-lastBookmarkLead))
	return nil
}

// mayJoin reports whether the watch may join a broadcast.
func (w *clientWatch) mayJoin() bool {
	return w.place.MayJoin() && time.Now().After(w.rejoinAfter)
}

func (w *clientWatch) leaveBroadcast() {
	w.hub.wakeups.clear(w)
	w.place.Left(w.broadcast.leave(w.receiver), w.receiver.NextBookmark)
	w.broadcast, w.receiver = nil, nil
}

// due checks the deadline, the shutdown, the client and the policy. again: the last bookmark is pending now. The error
// ends the watch.
func (w *clientWatch) due(ctx context.Context) (again bool, err error) {
	select {
	case <-ctx.Done():
		return false, errDone
	case <-w.Stopping:
		return false, errDone
	default:
	}
	if w.isClosed() {
		return false, errDone
	}
	if !w.permitted(ctx) {
		return false, errDone
	}
	now := time.Now()
	if !now.Before(w.Deadline) {
		return false, errDone
	}
	if w.lastBookmark || now.Before(w.Deadline.Add(-lastBookmarkLead)) {
		return false, nil
	}
	w.lastBookmark = true
	w.hub.wakeups.set(w, w.Deadline)
	w.broadcast.bookmarkNow(w.receiver)
	return true, nil
}

// permitted reauthorizes the watch if the policy has changed, and reports whether the watch may continue.
func (w *clientWatch) permitted(ctx context.Context) bool {
	select {
	case <-w.policyChanged:
		return w.reauthorize(ctx)
	default:
		return true
	}
}

// reauthorize reports whether the client may watch under the current policy. It also returns true if ctx or the watch's
// deadline ends first. policyChanged then stays closed, so that a watch that goes on is reauthorized again.
func (w *clientWatch) reauthorize(ctx context.Context) bool {
	ctx, cancel := context.WithDeadline(ctx, w.Deadline)
	defer cancel()
	changed := w.PolicyChanged()
	allowed := w.Allowed(ctx)
	if allowed && ctx.Err() == nil {
		w.policyChanged = changed
	}
	return allowed
}
