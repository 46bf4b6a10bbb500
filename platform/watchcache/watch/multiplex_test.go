package watch_test

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// multiplexed makes start use a call of Watches.
var multiplexed bool

// A watch of a call of Watches behaves as a watch with a call of its own.
func TestWatchesOfACall(t *testing.T) {
	multiplexed = true
	defer func() { multiplexed = false }()
	for name, test := range map[string]func(*testing.T){
		"a large event":         TestALargeEventIsSentAlone,
		"selected events":       TestAWatchReceivesSelectedEvents,
		"initial events":        TestInitialEvents,
		"resume":                TestResume,
		"differing objects":     TestWatchesOfDifferingObjectsExpire,
		"drain":                 TestADrainingReplicaEndsItsWatches,
		"undiscovered resource": TestAWatchOfAnUndiscoveredResource,
	} {
		t.Run(name, test)
	}
}

// callStream is the server's end of a call of Watches.
type callStream struct {
	grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]
	frames
	requests chan *watchfanoutv1.WatchesRequest
	onSend   func(*watchfanoutv1.WatchFrame)
}

func (s *callStream) Context() context.Context { return s.frames.Context() }
func (s *callStream) Send(m *watchfanoutv1.WatchFrame) error {
	if s.onSend != nil {
		s.onSend(m)
	}
	return s.frames.Send(m)
}
func (s *callStream) SendMsg(m any) error { return s.frames.SendMsg(m) }

func (s *callStream) Recv() (*watchfanoutv1.WatchesRequest, error) {
	select {
	case r, ok := <-s.requests:
		if !ok {
			return nil, io.EOF
		}
		return r, nil
	case <-s.ctx.Done():
		return nil, status.FromContextError(s.ctx.Err()).Err()
	}
}

// testCall is a call of Watches, and its end.
type testCall struct {
	*callStream
	multiplexer *watch.Multiplexer
	ended       chan error
}

func startCall(ctx context.Context, s *watch.Server, period time.Duration) *testCall {
	return callOf(ctx, newMultiplexer(s, period))
}

// runEventsOnly runs a server without objects until the test ends.
func runEventsOnly(t *testing.T) (*eventsOnly, context.Context) {
	server := newEventsOnly(reset(9, 0, ""))
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		server.tasks.Wait()
	})
	server.run(ctx)
	return server, ctx
}

func newMultiplexer(s *watch.Server, period time.Duration) *watch.Multiplexer {
	return &watch.Multiplexer{
		ServerOf:       func(*commonv1.Resource) (*watch.Server, error) { return s, nil },
		ProgressPeriod: period,
	}
}

func callOf(ctx context.Context, m *watch.Multiplexer) *testCall {
	c := &testCall{
		callStream: &callStream{
			frames:   frames{ctx: ctx, c: make(chan *watchfanoutv1.WatchFrame, 100)},
			requests: make(chan *watchfanoutv1.WatchesRequest),
		},
		multiplexer: m,
		ended:       make(chan error, 1),
	}
	go func() { c.ended <- c.multiplexer.Watches(c.callStream) }()
	return c
}

// begin begins a watch of a pod.
func (c *testCall) begin(id uint64, pod string) {
	q := fixture.Query()
	q.FieldSelector = "metadata.name=" + pod
	c.requests <- &watchfanoutv1.WatchesRequest{
		WatchId: id,
		Watch:   &watchfanoutv1.WatchRequest{Query: q, ResourceVersion: "10", AllowBookmarks: true},
	}
}

// next returns the next frame that is not a position.
func (c *testCall) next(t *testing.T) *watchfanoutv1.WatchFrame {
	t.Helper()
	for {
		select {
		case m := <-c.c:
			if len(m.Data) > 0 || m.Status != nil {
				return m
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("no frame comes")
		}
	}
}

// watchInCall serves a watch in a call of its own, and returns the watch's status.
func watchInCall(ctx context.Context, s *watch.Server, r *watchfanoutv1.WatchRequest,
	to chan<- *watchfanoutv1.WatchFrame) error {
	c := startCall(ctx, s, time.Hour)
	c.requests <- &watchfanoutv1.WatchesRequest{WatchId: 1, Watch: r}
	for {
		select {
		case m := <-c.c:
			if end := m.Status; end != nil {
				return status.ErrorProto(&spb.Status{Code: end.Code, Message: end.Message})
			}
			to <- m
		case <-time.After(time.Millisecond): // the service drains its servers and its calls together
			if s.Draining() {
				c.multiplexer.Drain()
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// An idle watch of a call has no goroutine, and receives its events and its bookmarks.
func TestAnIdleWatchOfACallHasNoGoroutine(t *testing.T) {
	w, s := newServer(t)
	ctx, cancel := context.WithCancel(t.Context())
	const watches = 200
	c := startCall(ctx, s, 500*time.Millisecond)
	before := runtime.NumGoroutine()
	for i := range uint64(watches) {
		c.begin(i+1, fmt.Sprint("p", i+1))
		for m := <-c.c; m.WatchId != i+1; m = <-c.c { // a bookmark of another watch may come first
		}
	}
	for until := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before+5; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d watches have %d goroutines", watches, runtime.NumGoroutine()-before)
		}
	}
	if n := s.Len(); n != watches {
		t.Fatalf("%d watches are open", n)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 11, "p7", "node-0", "")
	events, bookmarks := 0, map[uint64]bool{}
	for len(bookmarks) < watches || events == 0 {
		m := c.next(t)
		if m.Boundaries[0].Bookmark {
			bookmarks[m.WatchId] = true
		} else if events++; m.WatchId != 7 {
			t.Errorf("watch %d receives %s", m.WatchId, m.Data)
		}
	}
	if events != 1 {
		t.Errorf("an event comes %d times", events)
	}
	cancel()
	if err := <-c.ended; status.Code(err) != codes.Canceled || s.Len() != 0 {
		t.Errorf("the call ends with %v, and %d watches stay", err, s.Len())
	}
}

// The caller ends a watch without the others. An ID that is in use ends the call.
func TestAWatchOfACallEndsAlone(t *testing.T) {
	w, s := newServer(t)
	c := startCall(t.Context(), s, time.Hour)
	c.begin(1, "a")
	c.begin(2, "b")
	for range 2 {
		<-c.c
	}
	c.requests <- &watchfanoutv1.WatchesRequest{WatchId: 1}
	if m := c.next(t); m.WatchId != 1 || codes.Code(m.Status.GetCode()) != codes.Canceled {
		t.Errorf("%v", m)
	}
	c.requests <- &watchfanoutv1.WatchesRequest{WatchId: 1} // it has ended
	w.Apply(logv1.Type_TYPE_MODIFIED, 11, "b", "node-0", "node-0")
	if m := c.next(t); m.WatchId != 2 || m.Status != nil {
		t.Errorf("%v", m)
	}
	c.begin(2, "b")
	if err := <-c.ended; status.Code(err) != codes.InvalidArgument || s.Len() != 0 {
		t.Errorf("the call ends with %v, and %d watches stay", err, s.Len())
	}
}

// The watches of a draining process end with a bookmark and UNAVAILABLE, and no watch begins.
func TestACallDrains(t *testing.T) {
	_, s := newServer(t)
	c := startCall(t.Context(), s, time.Hour)
	for i := range uint64(3) {
		c.begin(i+1, "a")
		<-c.c
	}
	c.multiplexer.Drain() // the servers drain later
	c.begin(4, "a")
	bookmarks := 0
	for ended := 0; ended < 4; {
		m := c.next(t)
		switch {
		case m.Status == nil && m.Boundaries[0].Bookmark:
			bookmarks++
		case codes.Code(m.Status.GetCode()) == codes.Unavailable && m.Status.Unready:
			ended++
		default:
			t.Fatalf("%v", m)
		}
	}
	if bookmarks != 3 {
		t.Errorf("%d bookmarks", bookmarks)
	}
	close(c.requests)
	if err := <-c.ended; err != nil || s.Len() != 0 {
		t.Errorf("the call ends with %v, and %d watches stay", err, s.Len())
	}
	another := startCall(t.Context(), s, time.Hour)
	another.multiplexer.Drain()
	another.begin(1, "a")
	if m := another.next(t); !m.Status.GetUnready() {
		t.Errorf("%v", m)
	}
}

// A watch whose owner has too many bytes in flight delays no event and no bookmark of another owner.
func TestAWaitingWatchOfACallDelaysNoOther(t *testing.T) {
	w, s := newServer(t)
	s.BoundInFlight(1)
	c := startCall(t.Context(), s, 50*time.Millisecond)
	c.done = make(chan func(), 1)
	begin := func(id uint64, owner string) {
		c.requests <- &watchfanoutv1.WatchesRequest{WatchId: id, Watch: &watchfanoutv1.WatchRequest{
			Query: fixture.Query(), ResourceVersion: "10", AllowBookmarks: true, Owner: owner,
		}}
	}
	begin(1, "loud")
	begin(2, "loud")
	begin(3, "quiet")
	for until := time.Now().Add(2 * time.Minute); s.Len() < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d watches are open", s.Len())
		}
	}
	w.Apply(logv1.Type_TYPE_ADDED, 11, strings.Repeat("x", 20_000), "", "")
	first, second := <-c.done, <-c.done // of both owners
	for until := time.Now().Add(2 * time.Minute); s.Waiting("loud") != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d messages wait", s.Waiting("loud"))
		}
	}
	bookmarks := map[uint64]int{}
	for bookmarks[3] < 3 {
		if m := c.next(t); m.Boundaries[0].Bookmark {
			bookmarks[m.WatchId]++
		}
	}
	first()
	second()
	(<-c.done)()
}

// An event that arrives while a tick sends a bookmark, and waits for its owner's quota, delays no other bookmark.
func TestATickSendsNoEvent(t *testing.T) {
	w, s := newServer(t)
	s.BoundInFlight(1)
	c := startCall(t.Context(), s, 50*time.Millisecond)
	c.done = make(chan func(), 1)
	large := strings.Repeat("x", 20_000)
	var once sync.Once
	c.onSend = func(m *watchfanoutv1.WatchFrame) {
		if m.WatchId == 2 && len(m.Boundaries) == 1 && m.Boundaries[0].Bookmark {
			once.Do(func() { w.Apply(logv1.Type_TYPE_ADDED, 12, large, "", "") })
		}
	}
	for id, owner := range []string{1: "loud", 2: "loud", 3: "quiet"} {
		if owner == "" {
			continue
		}
		q := fixture.Query()
		if id == 3 {
			q.FieldSelector = "metadata.name=a"
		}
		c.requests <- &watchfanoutv1.WatchesRequest{WatchId: uint64(id), Watch: &watchfanoutv1.WatchRequest{
			Query: q, ResourceVersion: "10", AllowBookmarks: true, Owner: owner,
		}}
		if id == 1 {
			w.Apply(logv1.Type_TYPE_ADDED, 11, large, "", "")
			defer (<-c.done)() // it stays in flight
		}
	}
	for bookmarks := 0; bookmarks < 20; {
		if m := c.next(t); m.WatchId == 3 && m.Boundaries[0].Bookmark {
			bookmarks++
		}
	}
}

// Each watch of a call with many gets fewer bookmarks. All of them end soon after the log has stalled.
func TestManyWatchesOfACallGetFewerBookmarks(t *testing.T) {
	const watches = 600 // in five periods
	synctest.Test(t, func(t *testing.T) {
		server, ctx := runEventsOnly(t)
		c := startCall(ctx, server.Server, time.Second)
		bookmarks, ended := make([]int, watches), 0
		for id := range uint64(watches) {
			c.requests <- &watchfanoutv1.WatchesRequest{WatchId: id, Watch: &watchfanoutv1.WatchRequest{
				Query: roleQuery(""), ResourceVersion: "9", AllowBookmarks: true,
			}}
		}
		revision := int64(9)
		for begin := time.Now(); ended < watches; {
			took := time.Since(begin)
			select {
			case m := <-c.c:
				switch {
				case m.Status != nil:
					ended++
				case len(m.Boundaries) > 0 && m.Boundaries[0].Bookmark:
					bookmarks[m.WatchId]++
				}
			case <-time.After(100 * time.Millisecond):
				revision++
				server.revision.Store(revision)
				if took < 20*time.Second {
					server.cache.Apply(progress(revision))
				}
			}
			if took > 26*time.Second {
				t.Fatalf("only %d watches end", ended)
			}
		}
		if least, most := slices.Min(bookmarks), slices.Max(bookmarks); least < 3 || most > 6 {
			t.Errorf("%d to %d bookmarks in 20 s", least, most)
		}
	})
}

// Each watch gets fewer bookmarks if a replica has many, also if each has a call of its own. Calls that begin together
// do not send together. A watch gets its first bookmarks each period, also if there are many other calls. All watches
// end soon after the log has stalled.
func TestManyCallsOfAWatchGetFewerBookmarks(t *testing.T) {
	const (
		watches = 1500 // in two periods
		stay    = 500  // in a period
		period  = 2 * time.Second
	)
	type testWatch struct {
		*testCall
		began     time.Time
		bookmarks []time.Time
		ended     bool
	}
	synctest.Test(t, func(t *testing.T) {
		server, ctx := runEventsOnly(t)
		m := newMultiplexer(server.Server, period)
		all := map[uint64]*testWatch{}
		begin := func(id uint64) {
			w := &testWatch{testCall: callOf(ctx, m), began: time.Now()}
			w.onSend = func(f *watchfanoutv1.WatchFrame) {
				if w.ended = f.Status != nil; len(f.Boundaries) > 0 {
					w.bookmarks = append(w.bookmarks, time.Now())
				}
			}
			all[id] = w
			w.requests <- &watchfanoutv1.WatchesRequest{WatchId: id, Watch: &watchfanoutv1.WatchRequest{
				Query: roleQuery(""), ResourceVersion: "9", AllowBookmarks: true,
			}}
		}

		began := time.Now()
		for i := range uint64(watches) {
			begin(2 * i) // a round has two ticks, and each ID is in the same
		}
		server.advance(20_700*time.Millisecond, true)
		begin(2 * watches)
		server.advance(19_300*time.Millisecond, true)
		inPeriod, sum := make([]int, 20), 0
		for id, w := range all {
			first := slices.IndexFunc(w.bookmarks, func(at time.Time) bool { return at.Sub(w.began) >= time.Second })
			if first < 0 || w.bookmarks[first].Sub(w.began) > time.Second+period {
				t.Errorf("watch %d began at %v, and received bookmarks at %v", id, w.began, w.bookmarks)
			}
			for _, at := range w.bookmarks {
				inPeriod[(at.Sub(began)-1)/period]++
			}
			sum += len(w.bookmarks)
		}
		t.Logf("%d bookmarks in 20 periods", sum)
		for i, n := range inPeriod[2:] {
			if n < watches*4/10 || n > watches*6/10 {
				t.Errorf("%d bookmarks in period %d", n, i+2)
			}
		}

		for i := range uint64(watches - stay) {
			all[2*i].requests <- &watchfanoutv1.WatchesRequest{WatchId: 2 * i}
		}
		server.advance(2*period, true)
		left := time.Now()
		server.advance(5*period, true)
		for id, w := range all {
			n := 0
			for _, at := range w.bookmarks {
				if at.After(left) {
					n++
				}
			}
			if ended := id < 2*(watches-stay); w.ended != ended || !ended && n != 5 {
				t.Errorf("watch %d has ended: %v, and received %d bookmarks in 5 periods", id, w.ended, n)
			}
		}

		for i := range uint64(watches - stay) {
			begin(2 * (watches + 1 + i))
		}
		server.advance(3*period, true)
		server.advance(6*time.Second, false) // the cache is stale at most 4 s after the log has stalled
		for id, w := range all {
			if !w.ended {
				t.Fatalf("watch %d has not ended", id)
			}
		}
	})
}

// counted counts the bookmarks and the ends of a call's watches.
type counted struct {
	*testCall
	bookmarks map[uint64]int
	ended     map[uint64]bool
}

func countedCallOf(ctx context.Context, m *watch.Multiplexer) *counted {
	c := &counted{callOf(ctx, m), map[uint64]int{}, map[uint64]bool{}}
	c.onSend = func(f *watchfanoutv1.WatchFrame) {
		if f.Status != nil {
			c.ended[f.WatchId] = true
		}
		if len(f.Boundaries) > 0 && f.Boundaries[0].Bookmark {
			c.bookmarks[f.WatchId]++
		}
	}
	go func() {
		for {
			select {
			case <-c.c:
			case <-ctx.Done():
				return
			}
		}
	}()
	return c
}

// beginMany begins n watches of roles.
func (c *counted) beginMany(n uint64) {
	for id := range n {
		c.requests <- &watchfanoutv1.WatchesRequest{WatchId: id, Watch: &watchfanoutv1.WatchRequest{
			Query: roleQuery(""), ResourceVersion: "9", AllowBookmarks: true,
		}}
	}
}

// expectBookmarks fails the test unless each of a call's first n watches received so many bookmarks.
func (c *counted) expectBookmarks(t *testing.T, n uint64, least, most int) {
	t.Helper()
	for id := range n {
		if got := c.bookmarks[id]; got < least || got > most {
			t.Errorf("watch %d received %d bookmarks", id, got)
		}
	}
}

// New watches get a bookmark each period only if their call has few. If a replica is lost, all watches of its calls are
// new at another.
func TestNewWatchesOfALargeCallKeepItsRounds(t *testing.T) {
	const large, others, period = 200, 2000, 2 * time.Second
	synctest.Test(t, func(t *testing.T) {
		server, ctx := runEventsOnly(t)
		m := newMultiplexer(server.Server, period)
		countedCallOf(ctx, m).beginMany(others)
		c := countedCallOf(ctx, m)
		c.beginMany(large)
		server.advance(3*period, true) // the first round of three
		c.expectBookmarks(t, large, 0, 1)
	})
}

// A watch ends once its cache is stale. The other watches of its call get no more bookmarks than before.
func TestAStaleCacheEndsOnlyItsWatches(t *testing.T) {
	const watches, period = 200, 2 * time.Second // a round has two periods
	synctest.Test(t, func(t *testing.T) {
		server, stalled := newEventsOnly(reset(9, 0, "")), newEventsOnly(reset(9, 0, ""))
		ctx, cancel := context.WithCancel(t.Context())
		defer stalled.tasks.Wait()
		defer server.tasks.Wait()
		defer cancel()
		server.run(ctx)
		stalled.run(ctx)
		m := newMultiplexer(server.Server, period)
		m.ServerOf = func(r *commonv1.Resource) (*watch.Server, error) {
			if r.Resource == "rolebindings" {
				return stalled.Server, nil
			}
			return server.Server, nil
		}
		c := countedCallOf(ctx, m)
		c.beginMany(watches)
		q := roleQuery("")
		q.Resource.Resource = "rolebindings"
		c.requests <- &watchfanoutv1.WatchesRequest{WatchId: watches, Watch: &watchfanoutv1.WatchRequest{
			Query: q, ResourceVersion: "9", AllowBookmarks: true,
		}}
		server.advance(period, true)
		stalled.revision.Add(1)
		server.advance(4*period, true)
		if len(c.ended) != 1 || !c.ended[watches] {
			t.Fatalf("the ended watches are %v", c.ended)
		}
		clear(c.bookmarks)
		server.advance(10*period, true)
		c.expectBookmarks(t, watches, 4, 6)
	})
}

// A call sends so many bookmarks in a period, and all calls of a replica, until the round takes ten periods.
func TestTheScheduleOfBookmarks(t *testing.T) {
	m := watch.Multiplexer{ProgressPeriod: 1600 * time.Millisecond}
	for _, c := range []struct {
		n, all   int
		ticks    uint64
		interval time.Duration
	}{
		{0, 0, 1, 1600 * time.Millisecond},
		{63, 63, 1, 1600 * time.Millisecond},
		{100, 100, 2, 800 * time.Millisecond},
		{128, 128, 4, 800 * time.Millisecond},
		{1_000, 1_000, 16, 800 * time.Millisecond},
		{10_000, 10_000, 160, 100 * time.Millisecond},
		{40_000, 40_000, 160, 100 * time.Millisecond},
		{1, 1_023, 1, 1600 * time.Millisecond},
		{1, 5_000, 5, 1600 * time.Millisecond},
		{1, 100_000, 10, 1600 * time.Millisecond},
		{1_000, 100_000, 20, 800 * time.Millisecond},
	} {
		if ticks, interval := m.Schedule(c.n, c.all); ticks != c.ticks || interval != c.interval {
			t.Errorf("%+v: %d ticks each %v", c, ticks, interval)
		}
	}
}
