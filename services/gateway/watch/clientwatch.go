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

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// Request is a client's watch request.
type Request struct {
	*watchfanoutv1.WatchRequest
	// User is the name of the watch's user.
	User string
	// StorageResource is the resource that the watched objects are stored as. It selects the replica.
	StorageResource string
	// Log is the event log of the resource's etcd.
	Log string
	// Deadline is when the watch times out.
	Deadline time.Time
	// BookmarkPeriod is the minimum time between bookmarks, if the client allows bookmarks. 0: every bookmark is sent.
	BookmarkPeriod time.Duration
	// Stopping ends the watch before Deadline, when the gateway shuts down. nil: a shutdown does not end it.
	Stopping <-chan struct{}
	// PolicyChanged returns a channel that is closed when a permission may have been revoked. Allowed then reports
	// whether the client may still watch. Allowed waits for a while if authz is unavailable.
	PolicyChanged func() <-chan struct{}
	Allowed       func(ctx context.Context) bool
	// Initialized is called, perhaps more than once, when the initial events have been sent or initializedTimeout has
	// passed. bytes is their size so far. The watch occupies its flow control seats until then. Nil: no call.
	Initialized func(bytes int64)
	// InitialEventsEnd is called when all initial events have been sent. Nil: no call.
	InitialEventsEnd func()
	// Compress makes the response a gzip body.
	Compress bool
	// Served reports whether discovery still has the resource. A watch of a deleted CRD ends, because no replica serves
	// it.
	Served func() bool
	// Detached is the context of the watch after its handler has returned. Nil: the handler returns with the watch's
	// end.
	Detached context.Context
}

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
	w.policyChanged = r.PolicyChanged()
	if !r.Allowed(ctx) { // the permission may have been revoked since the authorization filter ran
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
	if !w.Served() {
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

func (w *clientWatch) sendHeaders() {
	if !w.headersSent {
		w.headersSent = true
		w.sink.SendHeaders(w.gzip != nil)
	}
}

// mayJoin reports whether the watch may join a broadcast.
func (w *clientWatch) mayJoin() bool {
	return w.place.MayJoin() && time.Now().After(w.rejoinAfter)
}

// hijack makes the client's response writable by the broadcast, if its connection supports that.
func (w *clientWatch) hijack(ctx context.Context) {
	if !w.hijackTried {
		w.hijackTried = true
		w.stream = w.sink.Hijack(ctx)
	}
}

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
	for {
		parts, err := w.broadcast.next(w.receiver)
		if err != nil {
			return err
		}
		if len(parts) > 0 {
			if err := w.write(ctx, parts...); err != nil {
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
	select {
	case <-w.policyChanged:
		if !w.reauthorize(ctx) {
			return false, errDone
		}
	default:
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

func (w *clientWatch) reauthorize(ctx context.Context) bool {
	w.policyChanged = w.PolicyChanged()
	return w.Allowed(ctx)
}

// write sends frames to the client, compressed for this watch alone if the response is a gzip body.
func (w *clientWatch) write(ctx context.Context, frames ...[]byte) error {
	if w.gzip != nil {
		return w.writePart(ctx, deflate.Compress(frames...))
	}
	n := 0
	for _, f := range frames {
		n += len(f)
	}
	return w.writeBytes(ctx, n, frames...)
}

// writePart sends a part of the gzip body.
func (w *clientWatch) writePart(ctx context.Context, part *deflate.Part) error {
	err := w.writeBytes(ctx, int(part.Size), w.gzip.part(part)...)
	if err != nil {
		w.gzip.broken = true
		return err
	}
	w.gzip.sent(part)
	return nil
}

// endTimeout bounds the wait for a client that must read the end of a response.
const endTimeout = time.Second

// endBody completes a gzip body, unless the client does not read it.
func (w *clientWatch) endBody(ctx context.Context) {
	if w.gzip == nil || w.gzip.broken || !w.headersSent || w.isClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if w.stream != nil {
		_ = w.stream.Write(ctx, endTimeout, w.gzip.end()...)
	} else {
		_ = w.sink.Write(ctx, endTimeout, w.gzip.end()...)
	}
}

// writeBytes sends bytes to the client. They occupy n bytes of memory until it has accepted them. It ends the watch if
// the client accepts no data for WriteTimeout, or for overQuotaTimeout if its user exceeds the in-flight quota. Other
// watches are not affected.
func (w *clientWatch) writeBytes(ctx context.Context, n int, frames ...[]byte) error {
	writeTimeout, hijacking, cancel := w.hub.Config.WriteTimeout, ctx, context.CancelFunc(func() {})
	defer w.inflight.account(-n)
	if w.inflight.account(n) {
		writeTimeout = min(writeTimeout, overQuotaTimeout)
		hijacking, cancel = context.WithTimeout(ctx, writeTimeout)
	}
	w.hijack(hijacking)
	cancel()
	var err error
	if w.stream != nil {
		err = w.stream.Write(ctx, writeTimeout, frames...)
	} else {
		err = w.sink.Write(ctx, writeTimeout, frames...)
	}
	if errors.Is(err, h2writer.ErrSlowClient) {
		slowClients.Inc()
		w.terminated()
	}
	if err != nil {
		return errDone
	}
	return nil
}
