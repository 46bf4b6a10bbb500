package watch

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// fakeTier is a watch tier with a log of numbered events. It records its requests.
type fakeTier struct {
	watchfanoutv1.WatchClient
	mu          sync.Mutex
	log         []int64
	low         int64
	maxRevision int64 // the revision that the tier has reached; 0: any
	changed     chan struct{}
	requests    []*watchfanoutv1.WatchRequest
	contexts    []context.Context
	broken      chan struct{}
}

func newTier() *fakeTier { return &fakeTier{changed: make(chan struct{}), broken: make(chan struct{})} }

func (t *fakeTier) write(revisions ...int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.log = append(t.log, revisions...)
	close(t.changed)
	t.changed = make(chan struct{})
}

// breakStreams ends every stream, like a killed replica.
func (t *fakeTier) breakStreams() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.broken)
	t.broken = make(chan struct{})
}

// waitForStreams waits until n streams have been opened.
func (t *fakeTier) waitForStreams(tt *testing.T, n int) {
	tt.Helper()
	for until := time.Now().Add(10 * time.Second); len(t.streams()) < n; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			tt.Fatalf("%d streams", len(t.streams()))
		}
	}
}

// waitForReceivers waits until the hub's broadcasts have n receivers.
func (h *Hub) waitForReceivers(t *testing.T, n int) {
	t.Helper()
	got := -1
	for until := time.Now().Add(10 * time.Second); got != n; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d receivers", got)
		}
		got = 0
		h.mu.Lock()
		for _, b := range h.broadcasts {
			b.mu.Lock()
			got += len(b.receivers)
			b.mu.Unlock()
		}
		h.mu.Unlock()
	}
}

func (t *fakeTier) streams() []*watchfanoutv1.WatchRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests
}

type tierStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	ctx      context.Context
	tier     *fakeTier
	revision int64
	first    []*watchfanoutv1.WatchFrame
	broken   chan struct{}
	expired  bool
	columns  bool
}

func (t *fakeTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	_ ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.requests, t.contexts = append(t.requests, r), append(t.contexts, ctx)
	s := &tierStream{ctx: ctx, tier: t, broken: t.broken}
	switch {
	case r.ResumeAfter != nil:
		s.revision = r.ResumeAfter.Revision
		s.expired = s.revision < t.low
	default: // initial events: the state is a single object
		s.revision = t.log[len(t.log)-1]
		s.first = append(s.first, &watchfanoutv1.WatchFrame{
			Data:              []byte("initial\n"),
			InitialEventsDone: true,
			Position:          &watchfanoutv1.Position{Revision: s.revision, Index: events.LastIndex},
		})
	}
	if !s.expired && (t.maxRevision == 0 || s.revision <= t.maxRevision) {
		s.first = append(s.first, &watchfanoutv1.WatchFrame{Position: &watchfanoutv1.Position{
			Revision: s.revision,
			Index:    events.LastIndex,
		}})
	}
	return s, nil
}

func (s *tierStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	if s.expired {
		s.expired = false
		return &watchfanoutv1.WatchFrame{Data: []byte("410\n"), End: true}, nil
	}
	if len(s.first) > 0 {
		m := s.first[0]
		s.first = s.first[1:]
		return m, nil
	}
	for {
		s.tier.mu.Lock()
		select {
		case <-s.broken: // a killed replica sends no later event
			s.tier.mu.Unlock()
			return nil, status.Error(codes.Unavailable, "killed")
		default:
		}
		for _, r := range s.tier.log {
			if r > s.revision {
				s.revision = r
				s.tier.mu.Unlock()
				data := []byte(fmt.Sprintf("e%d\n", r))
				p := &watchfanoutv1.Position{Revision: r}
				boundary := &watchfanoutv1.EventBoundary{End: int32(len(data)), Position: p}
				if r%10 == 0 { // every tenth is a bookmark
					copy(data, "b")
					boundary.Bookmark = true
				}
				s.columns = s.columns || !boundary.Bookmark
				return &watchfanoutv1.WatchFrame{
					Data:        data,
					Position:    p,
					Boundaries:  []*watchfanoutv1.EventBoundary{boundary},
					ColumnsSent: s.columns,
				}, nil
			}
		}
		changed := s.tier.changed
		s.tier.mu.Unlock()
		select {
		case <-changed:
		case <-s.broken:
			return nil, status.Error(codes.Unavailable, "killed")
		case <-s.ctx.Done():
			return nil, status.FromContextError(s.ctx.Err()).Err()
		}
	}
}

// recordingSink is a client that records the data it receives.
type recordingSink struct {
	mu      sync.Mutex
	text    strings.Builder
	changed chan struct{}
	block   chan struct{}
}

func newScreen() *recordingSink { return &recordingSink{changed: make(chan struct{}, 100000)} }

func (s *recordingSink) SendHeaders()                            {}
func (s *recordingSink) Hijack(context.Context) *h2writer.Stream { return nil }

func (s *recordingSink) Fail(err error) {
	_ = s.Write(context.Background(), time.Hour, []byte(err.Error()))
}

func (s *recordingSink) Write(ctx context.Context, writeTimeout time.Duration, frames ...[]byte) error {
	if s.block != nil {
		select {
		case <-s.block:
		case <-time.After(writeTimeout):
			return h2writer.ErrSlowClient
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	for _, f := range frames {
		s.text.Write(f)
	}
	s.mu.Unlock()
	s.changed <- struct{}{}
	return nil
}

func (s *recordingSink) expect(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(5 * time.Second)
	for {
		s.mu.Lock()
		got := strings.ReplaceAll(s.text.String(), "\n", " ")
		s.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-s.changed:
		case <-deadline:
			t.Fatalf("received %q, want %q", got, want)
		}
	}
}

type client struct {
	*recordingSink
	cancel context.CancelFunc
	done   chan struct{}
}

func (h *Hub) watch(t *testing.T, change func(*Request)) *client {
	c := &client{recordingSink: newScreen(), done: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	c.cancel = cancel
	r := &Request{
		WatchRequest: &watchfanoutv1.WatchRequest{
			ResourceVersion: "5",
			Query:           &watchfanoutv1.Query{Resource: &commonv1.Resource{Version: "v1", Resource: "pods"}},
		},
		StorageResource: "pods",
		Deadline:        time.Now().Add(time.Minute),
		BookmarkPeriod:  h.Config.BookmarkPeriod,
		PolicyChanged: func() <-chan struct{} {
			return nil
		},
		Allowed: func(context.Context) bool { return true },
		Served:  func() bool { return true },
	}
	if change != nil {
		change(r)
	}
	go func() { defer close(c.done); h.Serve(ctx, r, c.recordingSink) }()
	t.Cleanup(func() { cancel(); <-c.done })
	return c
}

func hub(t *fakeTier) *Hub {
	return &Hub{
		Client:   t,
		Revision: func(context.Context) (int64, error) { return 1000, nil },
		Config: &Config{
			BookmarkPeriod:      time.Minute,
			WriteTimeout:        time.Second,
			BroadcastBytes:      1 << 20,
			BroadcastTotalBytes: 1 << 30,
		},
	}
}

func TestEqualQueriesShareOneBroadcast(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	a := h.watch(t, nil)
	a.expect(t, "e6 e7 ")
	b := h.watch(t, func(r *Request) { r.ResourceVersion = "6" })
	b.expect(t, "e7 ")
	c := h.watch(t, func(r *Request) { r.ResourceVersion = "9" }) // from a server that is ahead
	up.write(8, 9, 11)
	a.expect(t, "e6 e7 e8 e9 e11 ")
	b.expect(t, "e7 e8 e9 e11 ")
	c.expect(t, "e11 ")
	if n := len(up.streams()); n != 2 { // the first client's own, and the broadcast's
		t.Errorf("%d streams", n)
	}
	other := h.watch(t, func(r *Request) { r.Query.LabelSelector = "a=b" })
	other.expect(t, "e6 e7 e8 e9 e11 ")
	if n := len(up.streams()); n != 4 {
		t.Errorf("%d streams for two queries", n)
	}
}

// A replica delays large events by owner, so an owner's streams must not carry another owner's watches.
func TestOwnersShareNoStream(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	for i, owner := range []string{"a", "b", "a"} {
		h.watch(t, func(r *Request) { r.Owner = owner }).expect(t, "e6 ")
		if i < 2 {
			up.waitForStreams(t, 2*i+2) // the client's own stream, and the broadcast's
		}
	}
	owners := map[string]int{}
	for _, r := range up.streams() {
		owners[r.Owner]++
	}
	if owners["a"] == 0 || owners["b"] != 2 || owners[""] != 0 {
		t.Errorf("streams by owner: %v", owners)
	}
}

func TestInitialEventsPrecedeBroadcast(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	first := h.watch(t, func(r *Request) { r.ResourceVersion = "7" })
	up.waitForStreams(t, 2) // its own, and the broadcast's
	unsynced := h.watch(t, func(r *Request) { r.ResourceVersion = "" })
	unsynced.expect(t, "initial ")
	up.write(8)
	unsynced.expect(t, "initial e8 ")
	first.expect(t, "e8 ")
	up.write(9)
	unsynced.expect(t, "initial e8 e9 ")
	unsynced.cancel()
	<-unsynced.done
	if n := len(up.streams()); n != 3 {
		t.Errorf("%d streams", n)
	}
}

func TestUnsyncedWatchCatchesUp(t *testing.T) {
	up := newTier()
	up.write(6, 7, 8)
	h := hub(up)
	ahead := h.watch(t, func(r *Request) { r.ResourceVersion = "7" })
	ahead.expect(t, "e8 ")
	behind := h.watch(t, nil)
	behind.expect(t, "e6 e7 e8 ")
	up.write(9)
	behind.expect(t, "e6 e7 e8 e9 ")
	ahead.expect(t, "e8 e9 ")
}

func TestClientsDoNotSeeReplicaLoss(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	a := h.watch(t, nil)
	a.expect(t, "e6 ")
	up.breakStreams()
	up.write(7)
	a.expect(t, "e6 e7 ")
	requests := up.streams()
	if last := requests[len(requests)-1]; last.ResumeAfter.GetRevision() != 6 {
		t.Errorf("resumed after %v", last.ResumeAfter)
	}
}

// A broadcast moves to the replica that now owns its resource. Events arrive once and in order.
func TestBroadcastFollowsReassignment(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	a := h.watch(t, nil)
	want := "e6 "
	a.expect(t, want)
	up.waitForStreams(t, 2)
	stop, written := make(chan struct{}), make(chan int64)
	go func() {
		n := int64(11)
		for ; ; n += 10 { // no bookmarks
			select {
			case <-stop:
				written <- n
				return
			case <-time.After(time.Millisecond):
				up.write(n)
			}
		}
	}()
	for n := 2; n < 5; n++ {
		up.mu.Lock()
		last := up.contexts[n-1]
		up.mu.Unlock()
		go rpc.ReassignmentOf(last)()
		select {
		case <-last.Done(): // another stream has replaced it
		case <-time.After(20 * time.Second):
			t.Fatal("the stream is not replaced")
		}
	}
	close(stop)
	end := <-written
	for n := int64(11); n < end; n += 10 {
		want += fmt.Sprintf("e%d ", n)
	}
	a.expect(t, want)
	if n := len(up.streams()); n != 5 {
		t.Errorf("%d streams", n)
	}
	up.breakStreams() // the stream resumes like any other
	up.write(end)
	a.expect(t, want+fmt.Sprintf("e%d ", end))
	a.cancel()
}

// waitForOpen waits until n streams are open.
func (t *fakeTier) waitForOpen(tt *testing.T, n int) {
	tt.Helper()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		t.mu.Lock()
		open := 0
		for _, c := range t.contexts {
			if c.Err() == nil {
				open++
			}
		}
		t.mu.Unlock()
		if open == n {
			return
		}
		if time.Now().After(until) {
			tt.Fatalf("%d streams are open", open)
		}
	}
}

// reassign reports to the nth stream that its resource has moved.
func (t *fakeTier) reassign(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	go rpc.ReassignmentOf(t.contexts[n-1])()
}

// If owners change again while a broadcast moves, a single stream remains.
func TestSupersededReassignmentLeavesNoStream(t *testing.T) {
	up := newTier()
	up.write(6)
	a := hub(up).watch(t, nil)
	a.expect(t, "e6 ")
	up.waitForStreams(t, 2)
	up.mu.Lock()
	up.maxRevision = 1 // new replicas have no frame to send yet
	up.mu.Unlock()
	up.reassign(2)
	up.waitForStreams(t, 3)
	up.mu.Lock()
	up.maxRevision = 0
	up.mu.Unlock()
	up.reassign(3)
	up.waitForStreams(t, 4)
	up.waitForOpen(t, 1)
	up.write(7)
	a.expect(t, "e6 e7 ")
}

// A replica that does not hold the broadcast's next event does not replace the current stream.
func TestReassignmentNeedsNextEvent(t *testing.T) {
	up := newTier()
	up.write(6)
	a := hub(up).watch(t, nil)
	a.expect(t, "e6 ")
	up.waitForStreams(t, 2)
	up.mu.Lock()
	up.low = 100
	up.mu.Unlock()
	up.reassign(2)
	up.waitForStreams(t, 4) // it tries again
	up.write(7)
	a.expect(t, "e6 e7 ")
	up.mu.Lock()
	up.low = 0
	up.mu.Unlock()
	up.waitForStreams(t, 5)
	up.waitForOpen(t, 1)
	up.write(8)
	a.expect(t, "e6 e7 e8 ")
}

// A broadcast may start too early for the log. Only its first client gets the error.
func TestExpiredWatchDoesNotEndOthers(t *testing.T) {
	up := newTier()
	up.low = 5
	up.write(6)
	h := hub(up)
	old := h.watch(t, func(r *Request) { r.ResourceVersion = "3" })
	fine := h.watch(t, func(r *Request) { r.ResourceVersion = "5" })
	old.expect(t, "410 ")
	<-old.done
	fine.expect(t, "e6 ")
	up.write(7)
	fine.expect(t, "e6 e7 ")
}

func TestSlowClientDoesNotEndOthers(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.WriteTimeout = 50 * time.Millisecond
	slow, quick := h.watch(t, nil), h.watch(t, nil)
	slow.block = make(chan struct{})
	up.write(6)
	quick.expect(t, "e6 ")
	<-slow.done
	up.write(7)
	quick.expect(t, "e6 e7 ")
}

// The events held for receivers that are behind are bounded. A receiver that is trimmed continues with its own stream.
func TestTrimmedReceiverBecomesUnsynced(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BroadcastBytes = 3 * (core.EntryBytes + 4)
	h.Config.WriteTimeout = time.Minute
	slow, quick := h.watch(t, nil), h.watch(t, nil)
	h.waitForReceivers(t, 2)
	before := len(up.streams())
	slow.block = make(chan struct{})
	want := ""
	for r := int64(11); r < 19; r++ {
		up.write(r)
		want += fmt.Sprintf("e%d ", r)
		quick.expect(t, want)
	}
	close(slow.block)
	slow.expect(t, want)
	if n := len(up.streams()) - before; n != 1 {
		t.Errorf("%d more streams, want the slow watch's", n)
	}
}

func TestBookmarksComeWhenTheyAreDue(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BookmarkPeriod = 0
	with := h.watch(t, func(r *Request) { r.AllowBookmarks = true })
	without := h.watch(t, nil)
	rare := hub(up).watch(t, func(r *Request) { r.AllowBookmarks = true })
	up.write(9, 10)
	with.expect(t, "e9 b10 ")
	up.write(11)
	with.expect(t, "e9 b10 e11 ")
	without.expect(t, "e9 e11 ")
	rare.expect(t, "e9 e11 ")
}

func TestTheLastBookmarkComesBeforeTheEnd(t *testing.T) {
	up := newTier()
	up.write(9, 10)
	h := hub(up)
	c := h.watch(t, func(r *Request) {
		r.AllowBookmarks = true
		r.Deadline = time.Now().Add(lastBookmarkLead + 100*time.Millisecond)
	})
	c.expect(t, "e9 b10 ")
	<-c.done
}

func TestARevokedPermissionEndsAWatch(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	policyChanged, allowed := make(chan struct{}), true
	var mu sync.Mutex
	revocable := h.watch(t, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { mu.Lock(); defer mu.Unlock(); return policyChanged }
		r.Allowed = func(context.Context) bool { mu.Lock(); defer mu.Unlock(); return allowed }
	})
	other := h.watch(t, nil)
	revocable.expect(t, "e6 ")
	mu.Lock()
	old := policyChanged
	policyChanged, allowed = make(chan struct{}), false
	mu.Unlock()
	close(old)
	<-revocable.done
	up.write(7)
	other.expect(t, "e6 e7 ")
}

// removableTier is a tier that does not serve the resource once gone is set.
type removableTier struct {
	*fakeTier
	gone *atomic.Bool
}

func (u removableTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	o ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	if u.gone.Load() {
		return nil, status.Error(codes.Unavailable, "not in discovery")
	}
	return u.fakeTier.Watch(ctx, r, o...)
}

// A watch of a deleted CRD ends. It is not held open for another replica.
func TestWatchEndsWithItsCRD(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	var gone atomic.Bool
	served := func(r *Request) { r.Served = func() bool { return !gone.Load() } }
	h.Client = removableTier{up, &gone}
	a, b := h.watch(t, served), h.watch(t, served)
	a.expect(t, "e6 ")
	b.expect(t, "e6 ")
	gone.Store(true)
	up.breakStreams()
	began := time.Now()
	<-a.done
	<-b.done
	if took := time.Since(began); took > resumeTimeout/2 {
		t.Errorf("they are held open for %v", took)
	}
}

// A Table's first row carries the columns, so it comes on the client's own stream.
func TestTableJoinsAfterFirstRow(t *testing.T) {
	up := newTier()
	h := hub(up)
	table := func(r *Request) {
		r.Query.Output = &registryv1.Output{As: &commonv1.Kind{Kind: "Table"}}
	}
	a, b := h.watch(t, table), h.watch(t, table)
	up.write(6)
	a.expect(t, "e6 ")
	b.expect(t, "e6 ")
	up.write(7, 8)
	a.expect(t, "e6 e7 e8 ")
	b.expect(t, "e6 e7 e8 ")
	own := 0
	for _, r := range up.streams() {
		if !r.ColumnsSent {
			own++
		}
	}
	if n := len(up.streams()); own != 2 ||
		n != 3 { // their own two and the broadcast's, in any order
		t.Errorf("%d streams, %d without columns sent", n, own)
	}
}

// A client that is ahead of the broadcast keeps its position when events before it are skipped.
func TestJoinRepeatsNoEvent(t *testing.T) {
	b := &watchBroadcast{
		hub:       hub(newTier()),
		Broadcast: core.NewBroadcast(events.Position{Revision: 80, Index: 0}),
		cancel:    func() {},
	}
	r := b.join(events.Position{Revision: 100, Index: events.LastIndex})
	b.dispatch(&watchfanoutv1.WatchFrame{Data: []byte("e95\n"), Position: &watchfanoutv1.Position{Revision: 95},
		Boundaries: []*watchfanoutv1.EventBoundary{{End: 4, Position: &watchfanoutv1.Position{Revision: 95}}}})
	if parts, err := b.next(r); len(parts) > 0 || err != nil {
		t.Errorf("%q %v", parts, err)
	}
	if position := b.leave(r); position != (events.Position{Revision: 100, Index: events.LastIndex}) {
		t.Errorf("its position is %v", position)
	}
}

// A client may name a future revision. Other clients do not wait for it.
func TestFutureRevisionStartsNoBroadcast(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	up.maxRevision = 6
	future := h.watch(t, func(r *Request) { r.ResourceVersion = "900" })
	present := h.watch(t, nil)
	present.expect(t, "e6 ")
	h.mu.Lock()
	for _, b := range h.broadcasts {
		if p := b.Position(); p.Revision > 6 {
			t.Errorf("a broadcast starts at %v", p)
		}
	}
	h.mu.Unlock()
	up.write(7)
	present.expect(t, "e6 e7 ")
	future.expect(t, "")
}

// A bookmark carries no columns, so the next row must.
func TestABookmarkIsNotATablesFirstRow(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BookmarkPeriod = time.Nanosecond
	c := h.watch(t, func(r *Request) {
		r.Query.Output = &registryv1.Output{As: &commonv1.Kind{Kind: "Table"}}
		r.AllowBookmarks = true
	})
	up.write(10)
	c.expect(t, "b10 ")
	up.write(11)
	c.expect(t, "b10 e11 ")
	if requests := up.streams(); requests[0].ColumnsSent {
		t.Error("the first row comes from a shared stream")
	}
}

// A revision that etcd has not reached is from another epoch. The client does not join a broadcast, which would skip
// the events up to that revision (F3).
func TestUnknownRevisionIsNotJoined(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	h.Revision = func(context.Context) (int64, error) { return 10, nil }
	a := h.watch(t, nil)
	a.expect(t, "e6 e7 ")
	before := len(up.streams())
	h.watch(t, func(r *Request) { r.ResourceVersion = "500" })
	for until := time.Now().Add(5 * time.Second); len(up.streams()) == before; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the tier receives no request")
		}
	}
}
