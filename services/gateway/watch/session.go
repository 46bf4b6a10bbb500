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
	"watershed.dev/services/gateway/wire"
)

// Request is a client's watch.
type Request struct {
	*watchfanoutv1.WatchRequest
	// StoredAs is the stored resource whose events it asks for: by it a replica is chosen.
	StoredAs string
	// Deadline is when its time is up.
	Deadline time.Time
	// BookmarkPeriod is how often it gets a bookmark, if it allows them; 0: as often as there is one.
	BookmarkPeriod time.Duration
	// Stopping ends it early: the gateway shuts down.
	Stopping <-chan struct{}
	// Moved is closed when permissions may have been taken away, and Allowed then says whether the client may still
	// watch. It waits, for a while, where nobody can be asked.
	Moved   func() <-chan struct{}
	Allowed func(ctx context.Context) bool
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
	s := &session{
		hub:     h,
		Request: r,
		out:     out,
		due:     time.Now().Add(min(r.BookmarkPeriod, firstBookmark)),
	}
	s.table = r.Query.GetOutput().GetAs().GetKind() == "Table"
	var err error
	if s.key, err = keyOf(r.Query, r.Owner); err != nil {
		out.Fail(err)
		return
	}
	s.budget = h.Budgets.join(r.Owner, h.Config.UserRate)
	defer s.budget.leave()
	s.unsent = h.Unsent.join(r.Owner)
	defer s.unsent.leave()
	s.moved = r.Moved()
	if !r.Allowed(ctx) { // it may have been revoked since the request was let in
		out.SendHeaders()
		return
	}
	// who measures by bookmarks is to have the response at once, also where nothing is to come
	if r.BookmarkPeriod == 0 {
		s.sendHeaders()
	}
	// One that waits for the tier does no work, and keeps nobody else out.
	seated := time.AfterFunc(initialFor, s.initialized)
	defer seated.Stop()
	// A watch from a known revision has no initial events: it may share from the start.
	initial := r.SendInitialEvents != nil && *r.SendInitialEvents
	if at, ok := after(r.ResourceVersion); ok && !initial {
		s.place(at)
	}
	s.run(ctx)
	if s.stream != nil {
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = s.stream.Finish(wait)
	}
}

// initialFor is how long a watch counts as a request in flight at most.
const initialFor = 5 * time.Second

// session is one client's open watch.
type session struct {
	*Request
	hub    *Hub
	key    key
	out    Sink
	stream *wire.Stream
	budget *budget
	unsent *unsent
	tried  bool // whether out can be taken
	opened bool
	// placed: everything up to ResumeAfter was sent, so the watch may share.
	placed bool
	// reached: the watch tier has come to that place, so a feed may begin there.
	reached bool
	// table: the first row brings the columns, so it must come on a stream of the client's own.
	table, columns bool
	// begun is how many bytes of initial events have been sent.
	begun atomic.Int64
	// due is when the next bookmark is.
	due  time.Time
	lost time.Time
	// until is when a client that shared what ended may share again.
	until time.Time
	moved <-chan struct{}
}

func (s *session) place(at events.Position) {
	s.placed = true
	s.initialized()
	s.ResumeAfter, s.InitialEventsDone = at.Proto(), true
}

func (s *session) initialized() {
	if s.Request.Initialized != nil {
		s.Request.Initialized(s.begun.Load())
	}
}

func (s *session) at() events.Position { return events.FromProto(s.ResumeAfter) }

// errDone ends a session without a word.
var errDone = errors.New("done")

// errJoin says that a session may share now.
var errJoin = errors.New("caught up")

func (s *session) run(ctx context.Context) {
	for {
		err := s.share(ctx)
		if errors.Is(err, errOverRate) {
			overBudget.Inc()
			err = errDone
		}
		if errors.Is(err, errEnded) {
			s.until = time.Now().Add(aloneFor)
		}
		if errors.Is(err, errBehind) || errors.Is(err, errEnded) {
			err = s.alone(ctx)
		}
		switch {
		case errors.Is(err, errJoin):
			continue
		case status.Code(err) == codes.Unavailable && ctx.Err() == nil:
			if s.retry(ctx) {
				continue
			}
			s.sendHeaders()
		case errors.Is(err, io.EOF), errors.Is(err, errDone), ctx.Err() != nil:
			s.sendHeaders()
		case !s.opened:
			s.out.Fail(rpc.FromStatus(err))
		}
		return
	}
}

// retry waits a little for another replica; false once that has taken too long.
func (s *session) retry(ctx context.Context) bool {
	if !s.Served() {
		return false
	}
	if s.ResumeAfter == nil && s.opened { // broken amid the initial events: what was sent cannot be taken back
		return false
	}
	if s.lost.IsZero() {
		s.lost = time.Now()
		resumed.Inc()
	} else if time.Since(s.lost) > heldOpen {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-s.Stopping:
		return false
	case <-time.After(pauseAfter(s.lost)):
		return time.Now().Before(s.Deadline)
	}
}

func (s *session) sendHeaders() {
	if !s.opened {
		s.opened = true
		s.out.SendHeaders()
	}
}

// mayShare says whether nothing keeps the session from sharing.
func (s *session) mayShare() bool {
	return s.placed && (!s.table || s.columns) && time.Now().After(s.until)
}

// hijack makes the client's stream one that a feed may write to, if that can be.
func (s *session) hijack(ctx context.Context) {
	if !s.tried {
		s.tried = true
		s.stream = s.out.Hijack(ctx)
	}
}

// share follows the feed of all who ask the same.
func (s *session) share(ctx context.Context) error {
	if !s.mayShare() {
		return errBehind
	}
	if !s.reached && !s.hub.exists(ctx, s.key, s.at()) {
		return errBehind // the tier says what is wrong with it
	}
	f, sub := s.hub.join(s.key, s.Request, s.at(), s.reached)
	if sub == nil {
		return errBehind
	}
	defer func() {
		s.ResumeAfter = f.leave(sub).Proto()
		s.due = sub.due
	}()
	s.sendHeaders()
	s.hijack(ctx)
	f.mu.Lock()
	sub.stream, sub.bookmarks, sub.period, sub.due = s.stream, s.AllowBookmarks, s.BookmarkPeriod, s.due
	sub.budget = s.budget
	f.mu.Unlock()
	timer := time.NewTimer(time.Until(s.Deadline.Add(-beforeEnd)))
	defer timer.Stop()
	for {
		parts, err := f.next(sub)
		if err != nil {
			return err
		}
		more := closed
		if len(parts) > 0 {
			if err := s.write(ctx, parts...); err != nil {
				return err
			}
		} else {
			more = sub.wake
		}
		select {
		case <-more:
		case <-timer.C:
			if !time.Now().Before(s.Deadline) {
				return errDone
			}
			timer.Reset(time.Until(s.Deadline))
			f.bookmarkNow(sub) // of the last bookmark
		case <-ctx.Done():
			return errDone
		case <-s.Stopping:
			return errDone
		case <-s.moved:
			if !s.allowed(ctx) {
				return errDone
			}
		}
	}
}

// closed is a channel on which nobody has to wait.
var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (s *session) allowed(ctx context.Context) bool {
	s.moved = s.Moved()
	return s.Allowed(ctx)
}

// write sends frames; a client that takes nothing for too long is cut off, alone. If its user holds too much of what
// clients have not taken, that is overdueAfter.
func (s *session) write(ctx context.Context, frames ...[]byte) error {
	patience, hijacking, cancel := s.hub.Config.WriteTimeout, ctx, context.CancelFunc(func() {})
	n := 0
	for _, f := range frames {
		n += len(f)
	}
	defer s.unsent.hold(-n)
	if s.unsent.hold(n) {
		patience = min(patience, overdueAfter)
		hijacking, cancel = context.WithTimeout(ctx, patience)
	}
	s.hijack(hijacking)
	cancel()
	var err error
	if s.stream != nil {
		err = s.stream.Write(ctx, patience, frames...)
	} else {
		err = s.out.Write(ctx, patience, frames...)
	}
	if errors.Is(err, wire.ErrSlow) {
		cutOff.Inc()
	}
	if err != nil {
		return errDone
	}
	return nil
}

// alone follows a stream that is no feed, its own or a flight's, until it has caught up.
func (s *session) alone(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, s.Deadline)
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
			case <-s.Stopping:
				cancel()
				return
			case <-s.moved:
				if !s.allowed(ctx) {
					cancel()
					return
				}
			}
		}
	})
	r := proto.Clone(s.WatchRequest).(*watchfanoutv1.WatchRequest)
	r.ColumnsSent = s.columns
	stream, done, err := s.open(ctx, r)
	if err != nil {
		return err
	}
	leave = done
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
	t := time.NewTimer(acceptAfter)
	defer t.Stop()
	select {
	case got = <-first:
	case <-t.C:
		s.sendHeaders() // a client learns at once that its watch is accepted
		got = <-first
	}
	for got.err == nil {
		if err := s.forward(ctx, got.frame); err != nil {
			return err
		}
		got.frame, got.err = stream.Recv()
	}
	if ctx.Err() != nil {
		return errDone
	}
	return got.err
}

// open begins the stream that an alone session goes on with: with others that ask the same, where it is to bring the
// initial events and there is room to keep them for the slowest.
func (s *session) open(ctx context.Context, r *watchfanoutv1.WatchRequest) (frames, func(), error) {
	if s.ResumeAfter == nil && s.initial() && s.hub.flown.Load() < s.hub.Config.FeedsBytes/2 {
		return s.hub.board(ctx, s.StoredAs, r)
	}
	stream, err := s.hub.Client.Watch(rpc.WithHashKey(ctx, s.StoredAs), r, grpc.WaitForReady(false))
	return stream, func() {}, err
}

// forward passes one frame on.
func (s *session) forward(ctx context.Context, m *watchfanoutv1.WatchFrame) error {
	s.lost = time.Time{}
	s.sendHeaders()
	s.columns = s.columns || m.ColumnsSent
	if len(m.Initial) > 0 {
		if err := s.write(ctx, m.Initial...); err != nil {
			return err
		}
		for _, part := range m.Initial {
			s.begun.Add(int64(len(part)))
		}
	}
	if data := s.wanted(m); len(data) > 0 {
		if err := s.write(ctx, data); err != nil {
			return err
		}
		if len(m.Initial) == 0 && s.placed { // initial events are flow control's
			s.budget.spend(costOf(len(m.Boundaries), len(data)))
			if s.budget.wait(ctx) != nil {
				return errDone
			}
		}
	}
	if m.End {
		return io.EOF
	}
	if m.Position.GetRevision() > 0 {
		s.ResumeAfter, s.reached = m.Position, true
		if m.InitialEventsDone || s.InitialEventsDone || !s.initial() {
			s.place(events.FromProto(m.Position))
		}
	}
	if s.mayShare() && s.hub.joinable(s.key, s.at()) {
		return errJoin
	}
	return nil
}

// initial says whether the watch begins with all objects.
func (s *session) initial() bool {
	if s.SendInitialEvents != nil {
		return *s.SendInitialEvents
	}
	return s.ResourceVersion == "" || s.ResourceVersion == "0"
}

// wanted is a frame without the bookmarks that are not due.
func (s *session) wanted(m *watchfanoutv1.WatchFrame) []byte {
	if !slices.ContainsFunc(m.Boundaries, func(k *watchfanoutv1.EventBoundary) bool { return k.Bookmark }) {
		return m.Data
	}
	var data []byte
	begin := int32(0)
	for _, k := range m.Boundaries {
		part := m.Data[begin:k.End]
		begin = k.End
		if k.Bookmark {
			if now := time.Now(); !s.AllowBookmarks || now.Before(s.due) && now.Before(s.Deadline.Add(-beforeEnd)) {
				continue
			}
			s.due = time.Now().Add(s.BookmarkPeriod)
		}
		data = append(data, part...)
	}
	return data
}
