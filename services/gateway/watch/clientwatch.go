package watch

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// Request is a client's watch.
type Request struct {
	*watchfanoutv1.WatchRequest
	// StorageResource is the stored resource whose events it asks for: by it a replica is chosen.
	StorageResource string
	// Deadline is when its time is up.
	Deadline time.Time
	// BookmarkPeriod is how often it gets a bookmark, if it allows them; 0: as often as there is one.
	BookmarkPeriod time.Duration
	// Stopping ends it early: the gateway shuts down.
	Stopping <-chan struct{}
	// PolicyChanged is closed when permissions may have been taken away, and Allowed then says whether the client may still
	// watch. It waits, for a while, where nobody can be asked.
	PolicyChanged func() <-chan struct{}
	Allowed       func(ctx context.Context) bool
	// Initialized is called, perhaps more than once, when the initial events have been sent, or have taken long, with
	// the bytes of those that have: flow control counts a watch until then. Nil: nobody asks.
	Initialized func(bytes int64)
	// Served says whether the resource is served still: one whose CRD is gone has nobody to go on with.
	Served func() bool
}

// Serve keeps a client's watch open until its time is up, the client leaves, or it ends in an error that the client
// sees.
func (h *Hub) Serve(ctx context.Context, r *Request, out Sink) {
	clients.Inc()
	defer clients.Dec()
	w := &clientWatch{
		hub:              h,
		Request:          r,
		sink:             out,
		nextBookmarkTime: time.Now().Add(min(r.BookmarkPeriod, firstBookmarkDelay)),
	}
	w.asTable = r.Query.GetOutput().GetAs().GetKind() == "Table"
	var err error
	if w.key, err = keyOf(r.Query, r.Owner); err != nil {
		out.Fail(err)
		return
	}
	w.limiter = h.RateLimiter.join(r.Owner, h.Config.UserRate)
	defer w.limiter.leave()
	w.inflight = h.InflightQuota.join(r.Owner)
	defer w.inflight.leave()
	w.policyChanged = r.PolicyChanged()
	if !r.Allowed(ctx) { // it may have been revoked since the request was let in
		out.SendHeaders()
		return
	}
	// who measures by bookmarks is to have the response at once, also where nothing is to come
	if r.BookmarkPeriod == 0 {
		w.sendHeaders()
	}
	// One that waits for the tier does no work, and keeps nobody else out.
	initializedTimer := time.AfterFunc(initializedTimeout, w.initialized)
	defer initializedTimer.Stop()
	// A watch from a known revision has no initial events: it may share from the start.
	initial := r.SendInitialEvents != nil && *r.SendInitialEvents
	if position, ok := positionAfter(r.ResourceVersion); ok && !initial {
		w.setPosition(position)
	}
	w.run(ctx)
	if w.stream != nil {
		finishCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = w.stream.Finish(finishCtx)
	}
}

// initializedTimeout is how long a watch counts as a request in flight at most.
const initializedTimeout = 5 * time.Second

// clientWatch is one client's open watch.
type clientWatch struct {
	*Request
	hub         *Hub
	key         key
	sink        Sink
	stream      *h2writer.Stream
	limiter     *limiter
	inflight    *ownerQuota
	hijackTried bool // whether out can be taken
	headersSent bool
	// positioned: everything up to ResumeAfter was sent, so the watch may share.
	positioned bool
	// positionReached: the watch tier has come to that place, so a feed may begin there.
	positionReached bool
	// asTable: the first row brings the columns, so it must come on a stream of the client's own.
	asTable, columnsSent bool
	// initialBytes is how many bytes of initial events have been sent.
	initialBytes atomic.Int64
	// nextBookmarkTime is when the next bookmark is.
	nextBookmarkTime time.Time
	unavailableSince time.Time
	// rejoinAfter is when a client that shared what ended may share again.
	rejoinAfter   time.Time
	policyChanged <-chan struct{}
}

func (w *clientWatch) setPosition(position events.Position) {
	w.positioned = true
	w.initialized()
	w.ResumeAfter, w.InitialEventsDone = position.Proto(), true
}

func (w *clientWatch) initialized() {
	if w.Request.Initialized != nil {
		w.Request.Initialized(w.initialBytes.Load())
	}
}

func (w *clientWatch) position() events.Position { return events.FromProto(w.ResumeAfter) }

// errDone ends a session without a word.
var errDone = errors.New("done")

// errCaughtUp says that a session may share now.
var errCaughtUp = errors.New("caught up")

func (w *clientWatch) run(ctx context.Context) {
	for {
		err := w.runJoined(ctx)
		if errors.Is(err, errThrottled) {
			overRate.Inc()
			err = errDone
		}
		if errors.Is(err, errBroadcastEnded) {
			w.rejoinAfter = time.Now().Add(rejoinBackoff)
		}
		if errors.Is(err, errUnsynced) || errors.Is(err, errBroadcastEnded) {
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
		return
	}
}

// retry waits a little for another replica; false once that has taken too long.
func (w *clientWatch) retry(ctx context.Context) bool {
	if !w.Served() {
		return false
	}
	if w.ResumeAfter == nil && w.headersSent { // broken amid the initial events: what was sent cannot be taken back
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

func (w *clientWatch) sendHeaders() {
	if !w.headersSent {
		w.headersSent = true
		w.sink.SendHeaders()
	}
}

// mayJoin says whether nothing keeps the session from sharing.
func (w *clientWatch) mayJoin() bool {
	return w.positioned && (!w.asTable || w.columnsSent) && time.Now().After(w.rejoinAfter)
}

// hijack makes the client's stream one that a feed may write to, if that can be.
func (w *clientWatch) hijack(ctx context.Context) {
	if !w.hijackTried {
		w.hijackTried = true
		w.stream = w.sink.Hijack(ctx)
	}
}

// runJoined follows the feed of all who ask the same.
func (w *clientWatch) runJoined(ctx context.Context) error {
	if !w.mayJoin() {
		return errUnsynced
	}
	if !w.positionReached && !w.hub.revisionExists(ctx, w.key, w.position()) {
		return errUnsynced // the tier says what is wrong with it
	}
	b, rcv := w.hub.joinBroadcast(w.key, w.Request, w.position(), w.positionReached)
	if rcv == nil {
		return errUnsynced
	}
	defer func() {
		w.ResumeAfter = b.leave(rcv).Proto()
		w.nextBookmarkTime = rcv.nextBookmarkTime
	}()
	w.sendHeaders()
	w.hijack(ctx)
	b.mu.Lock()
	rcv.stream, rcv.allowBookmarks = w.stream, w.AllowBookmarks
	rcv.bookmarkPeriod, rcv.nextBookmarkTime = w.BookmarkPeriod, w.nextBookmarkTime
	rcv.limiter = w.limiter
	b.mu.Unlock()
	timer := time.NewTimer(time.Until(w.Deadline.Add(-lastBookmarkLead)))
	defer timer.Stop()
	for {
		parts, err := b.next(rcv)
		if err != nil {
			return err
		}
		ready := closedChan
		if len(parts) > 0 {
			if err := w.write(ctx, parts...); err != nil {
				return err
			}
		} else {
			ready = rcv.wake
		}
		select {
		case <-ready:
		case <-timer.C:
			if !time.Now().Before(w.Deadline) {
				return errDone
			}
			timer.Reset(time.Until(w.Deadline))
			b.bookmarkNow(rcv) // of the last bookmark
		case <-ctx.Done():
			return errDone
		case <-w.Stopping:
			return errDone
		case <-w.policyChanged:
			if !w.reauthorize(ctx) {
				return errDone
			}
		}
	}
}

// closedChan is a channel on which nobody has to wait.
var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (w *clientWatch) reauthorize(ctx context.Context) bool {
	w.policyChanged = w.PolicyChanged()
	return w.Allowed(ctx)
}

// write sends frames; a client that takes nothing for too long is cut off, alone. If its user holds too much of what
// clients have not taken, that is overQuotaTimeout.
func (w *clientWatch) write(ctx context.Context, frames ...[]byte) error {
	writeTimeout, hijacking, cancel := w.hub.Config.WriteTimeout, ctx, context.CancelFunc(func() {})
	n := 0
	for _, f := range frames {
		n += len(f)
	}
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
	}
	if err != nil {
		return errDone
	}
	return nil
}

// runUnsynced follows a stream that is no feed, its own or a flight's, until it has caught up.
func (w *clientWatch) runUnsynced(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, w.Deadline)
	defer cancel()
	var wg sync.WaitGroup
	leave := func() {}
	defer func() { // whoever leaves a flight must not be about to take a frame of it
		cancel()
		wg.Wait()
		leave()
	}()
	wg.Go(func() { // what ends it early; who shares needs no goroutine for this
		for {
			select {
			case <-ctx.Done():
				return
			case <-w.Stopping:
				cancel()
				return
			case <-w.policyChanged:
				if !w.reauthorize(ctx) {
					cancel()
					return
				}
			}
		}
	})
	r := proto.Clone(w.WatchRequest).(*watchfanoutv1.WatchRequest)
	r.ColumnsSent = w.columnsSent
	stream, leaveStream, err := w.openStream(ctx, r)
	if err != nil {
		return err
	}
	leave = leaveStream
	type received struct {
		frame *watchfanoutv1.WatchFrame
		err   error
	}
	first := make(chan received, 1)
	wg.Go(func() {
		m, err := stream.Recv()
		first <- received{m, err}
	})
	var got received
	t := time.NewTimer(headersDelay)
	defer t.Stop()
	select {
	case got = <-first:
	case <-t.C:
		w.sendHeaders() // a client learns at once that its watch is accepted
		got = <-first
	}
	for got.err == nil {
		if err := w.forward(ctx, got.frame); err != nil {
			return err
		}
		got.frame, got.err = stream.Recv()
	}
	if ctx.Err() != nil {
		return errDone
	}
	return got.err
}

// openStream begins the stream that an alone session goes on with: with others that ask the same, where it is to bring the
// initial events and there is room to keep them for the slowest.
func (w *clientWatch) openStream(ctx context.Context, r *watchfanoutv1.WatchRequest) (frameReceiver, func(), error) {
	if w.ResumeAfter == nil && w.wantsInitialEvents() &&
		w.hub.bufferedBytes.Load() < w.hub.Config.BroadcastTotalBytes/2 {
		return w.hub.joinInitialEvents(ctx, w.StorageResource, r)
	}
	stream, err := w.hub.Client.Watch(rpc.WithHashKey(ctx, w.StorageResource), r, grpc.WaitForReady(false))
	return stream, func() {}, err
}

// forward passes one frame on.
func (w *clientWatch) forward(ctx context.Context, m *watchfanoutv1.WatchFrame) error {
	w.unavailableSince = time.Time{}
	w.sendHeaders()
	w.columnsSent = w.columnsSent || m.ColumnsSent
	if len(m.Initial) > 0 {
		if err := w.write(ctx, m.Initial...); err != nil {
			return err
		}
		for _, part := range m.Initial {
			w.initialBytes.Add(int64(len(part)))
		}
	}
	if data := w.withoutEarlyBookmarks(m); len(data) > 0 {
		if err := w.write(ctx, data); err != nil {
			return err
		}
		if len(m.Initial) == 0 && w.positioned { // initial events are flow control's
			w.limiter.charge(eventCost(len(m.Boundaries), len(data)))
			if w.limiter.wait(ctx) != nil {
				return errDone
			}
		}
	}
	if m.End {
		return io.EOF
	}
	if m.Position.GetRevision() > 0 {
		w.ResumeAfter, w.positionReached = m.Position, true
		if m.InitialEventsDone || w.InitialEventsDone || !w.wantsInitialEvents() {
			w.setPosition(events.FromProto(m.Position))
		}
	}
	if w.mayJoin() && w.hub.joinable(w.key, w.position()) {
		return errCaughtUp
	}
	return nil
}

// wantsInitialEvents says whether the watch begins with all objects.
func (w *clientWatch) wantsInitialEvents() bool {
	if w.SendInitialEvents != nil {
		return *w.SendInitialEvents
	}
	return w.ResourceVersion == "" || w.ResourceVersion == "0"
}

// withoutEarlyBookmarks is a frame without the bookmarks that are not due.
func (w *clientWatch) withoutEarlyBookmarks(m *watchfanoutv1.WatchFrame) []byte {
	if !slices.ContainsFunc(m.Boundaries, func(k *watchfanoutv1.EventBoundary) bool { return k.Bookmark }) {
		return m.Data
	}
	var data []byte
	offset := int32(0)
	for _, k := range m.Boundaries {
		part := m.Data[offset:k.End]
		offset = k.End
		if k.Bookmark {
			if now := time.Now(); !w.AllowBookmarks ||
				now.Before(w.nextBookmarkTime) && now.Before(w.Deadline.Add(-lastBookmarkLead)) {
				continue
			}
			w.nextBookmarkTime = time.Now().Add(w.BookmarkPeriod)
		}
		data = append(data, part...)
	}
	return data
}
