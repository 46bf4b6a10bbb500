package watch

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/services/gateway/h2writer"
)

// Serve serves a client's watch until its deadline, until the client leaves, or until an error that the client sees. If
// the watch is detached (h2writer.Stream.Detach), Serve returns once the watch is a receiver of a broadcast.
func (h *Hub) Serve(ctx context.Context, r *Request, out Sink) {
	clients.Inc()
	w := &clientWatch{
		hub:     h,
		Request: r,
		sink:    out,
		place:   core.NewWatch(r.WatchRequest, time.Now().Add(min(r.BookmarkPeriod, firstBookmarkDelay))),
		woken:   make(chan struct{}, 1),
	}
	if r.Compress {
		w.gzip = new(gzipBody)
	}
	w.limiter = h.RateLimiter.join(r.Owner, h.Config.UserRate)
	w.inflight = h.InflightQuota.join(r.Owner)
	w.usage = h.Usages.join(r)
	parked, panicked := false, any(errPanicked)
	defer func() {
		if parked {
			return
		}
		w.ended()
		if w.detached {
			w.stream.End(panicked)
		}
	}()
	parked, panicked = w.serve(ctx, r, out), nil
}

// errPanicked resets a detached stream if its watch panics on the handler's goroutine.
var errPanicked = errors.New("the watch panicked")

// serve serves the watch on its handler's goroutine. It returns true if the watch has no goroutine now.
func (w *clientWatch) serve(ctx context.Context, r *Request, out Sink) (parked bool) {
	var err error
	if w.key, err = keyOf(r.Query, r.Owner); err != nil {
		out.Fail(err)
		return false
	}
	// the permission may have been revoked since the authorization filter ran
	if !w.reauthorize(ctx) || !time.Now().Before(r.Deadline) {
		w.sendHeaders()
		w.endBody(ctx)
		return false
	}
	// The internal services have period 0. They measure freshness by bookmarks and need the response before the first
	// event.
	if r.BookmarkPeriod == 0 {
		w.sendHeaders()
	}
	// A watch that waits for the tier does no work, so it should not occupy a seat.
	if initialized := r.Initialized; initialized != nil {
		initializedTimer := time.AfterFunc(initializedTimeout, func() { initialized(w.initialBytes.Load()) })
		defer initializedTimer.Stop()
	}
	if w.place.Positioned {
		w.initialized()
	}
	if w.run(ctx) {
		return true
	}
	w.endBody(ctx)
	if w.stream != nil && !w.detached {
		finishCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = w.stream.Finish(finishCtx)
	}
	return false
}

// ended returns the resources of a watch that has ended.
func (w *clientWatch) ended() {
	w.hub.signals.remove(w.Stopping, w)
	w.hub.signals.remove(w.subscribed, w)
	w.inflight.leave()
	w.limiter.leave()
	w.usage.leave()
	clients.Dec()
}

// initializedTimeout is the longest time that a watch counts as a request in flight.
const initializedTimeout = 5 * time.Second

// clientWatch is a client's open watch. The goroutine that called Serve owns it, except initialBytes and the fields
// under mu. A detached watch has a goroutine only while it has something to do (detached.go). In runUnsynced a second
// goroutine owns policyChanged.
//
//	start --> unsynced --- caught up ---> joined.
//	             ^                          |
//	             +---- core.ErrUnsynced or core.ErrEnded.
//
// The states:
//
//   - unsynced (runUnsynced): the watch has its own stream, or shares a stream for the initial events.
//   - joined (runJoined): the watch is a receiver of a broadcast.
//
// place is the position of the last event sent, in both states. After a lost stream, retry resumes there.
type clientWatch struct {
	*Request
	hub         *Hub
	key         key
	sink        Sink
	stream      *h2writer.Stream
	limiter     *limiter
	inflight    *ownerQuota
	usage       *usage
	hijackTried bool // whether sink.Hijack was called
	headersSent bool
	place       core.Watch
	// gzip is nil if the response is plain.
	gzip *gzipBody
	// initialBytes is the size of the initial events sent so far.
	initialBytes     atomic.Int64
	unavailableSince time.Time
	// rejoinAfter is when the watch may join a broadcast again after its last broadcast ended.
	rejoinAfter   time.Time
	policyChanged <-chan struct{}

	// broadcast and receiver are set while the watch is joined. wakeup is then the time of its last bookmark, and of
	// its deadline after lastBookmark was due.
	broadcast    *watchBroadcast
	receiver     *receiver
	wakeup       wakeup
	lastBookmark bool

	// detached: the handler has returned or will. subscribed is the policyChanged that wakes the parked watch.
	detached    bool
	detachTried bool
	subscribed  <-chan struct{}

	// woken makes the goroutine look at everything that may have changed. Its capacity is 1.
	woken chan struct{}
	mu    sync.Mutex
	// parked: no goroutine runs the watch, and wake starts it. cancel ends the context of the goroutine of a detached
	// watch. closed: the client has closed a detached watch.
	parked, closed bool
	cancel         context.CancelFunc
}

func (w *clientWatch) initialized() {
	if w.Request.Initialized != nil {
		w.Request.Initialized(w.initialBytes.Load())
	}
}

// errDone ends a watch without an error for the client.
var errDone = errors.New("done")

// errCaughtUp: the watch may join a broadcast now.
var errCaughtUp = errors.New("caught up")

// errParked: a detached watch, or a broadcast, has nothing to do.
var errParked = errors.New("parked")

// run serves the watch until it ends, or is parked. The caller does not own a parked watch any longer.
func (w *clientWatch) run(ctx context.Context) (parked bool) {
	for {
		err := w.runJoined(ctx)
		if err == errParked { //nolint:errorlint // it is never wrapped
			return true
		}
		if errors.Is(err, core.ErrThrottled) {
			overRate.Inc()
			w.terminated()
			err = errDone
		}
		if errors.Is(err, core.ErrEnded) {
			w.rejoinAfter = time.Now().Add(rejoinBackoff)
		}
		if errors.Is(err, core.ErrUnsynced) || errors.Is(err, core.ErrEnded) {
			err = w.runUnsynced(ctx)
		}
		switch {
		case errors.Is(err, errCaughtUp):
			continue
		case status.Code(err) == codes.Unavailable && ctx.Err() == nil:
			if w.retry(ctx) {
				continue
			}
			w.sendHeaders()
		case errors.Is(err, io.EOF), errors.Is(err, errDone), ctx.Err() != nil:
			w.sendHeaders()
		case !w.headersSent:
			w.sink.Fail(rpc.FromStatus(err))
		}
		return false
	}
}

// retry waits before the next stream. It returns false if the watch must end.
func (w *clientWatch) retry(ctx context.Context) bool {
	if !w.hub.Discovery.Serves(w.Query.GetResource()) {
		return false
	}
	if !w.place.Resumable() {
		return false
	}
	if w.unavailableSince.IsZero() {
		w.unavailableSince = time.Now()
		resumes.Inc()
	} else if time.Since(w.unavailableSince) > resumeTimeout {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-w.Stopping:
		return false
	case <-time.After(retryDelay(w.unavailableSince)):
		return time.Now().Before(w.Deadline)
	}
}

// terminated counts a watch that ends because its client is too slow.
func (w *clientWatch) terminated() {
	r := w.Query.GetResource()
	cachermetrics.TerminatedWatchersCounter.WithLabelValues(r.GetGroup(), r.GetResource()).Inc()
}
