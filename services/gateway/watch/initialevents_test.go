package watch

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/turns"
)

// fakeSource opens streams whose frames carry the stream's number. A stream sends frames after it is released.
type fakeSource struct {
	mu      sync.Mutex
	opened  []*fakeStream
	started chan struct{} // a value per stream
	padding string        // of each event
}

type fakeStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	ctx      context.Context
	openedAt time.Time
	n        int
	release  chan struct{} // closed when the stream may respond
	total    int
	sent     int
	err      error
	padding  string
	more     chan struct{} // closed when the stream may send its second frame; nil: at once
}

func newSource() *fakeSource { return &fakeSource{started: make(chan struct{}, 1000)} }

func (s *fakeSource) Watch(ctx context.Context, _ *watchfanoutv1.WatchRequest,
	_ ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &fakeStream{
		ctx:      ctx,
		openedAt: time.Now(),
		n:        len(s.opened),
		release:  make(chan struct{}),
		total:    20,
		err:      status.Error(codes.Unavailable, "killed"),
		padding:  s.padding,
	}
	s.opened = append(s.opened, d)
	s.started <- struct{}{}
	return d, nil
}

func (d *fakeStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	select {
	case <-d.release:
	case <-d.ctx.Done():
		return nil, status.FromContextError(d.ctx.Err()).Err()
	}
	if d.sent == d.total {
		return nil, d.err
	}
	if d.sent == 1 && d.more != nil {
		<-d.more
	}
	d.sent++
	return &watchfanoutv1.WatchFrame{Initial: [][]byte{fmt.Appendf(nil, "%d.%d %s", d.n, d.sent, d.padding)}}, nil
}

func (s *fakeSource) stream(n int) *fakeStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened[n]
}

func (s *fakeSource) streamCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.opened)
}

func (s *fakeSource) hub() *Hub {
	return &Hub{
		Client:      s,
		Discovery:   &fakeDiscovery{},
		MemoryQuota: new(MemoryQuota),
		Config:      &Config{BroadcastTotalBytes: 1 << 20},
		startDelay:  time.Minute,
	}
}

// drain returns the data that a member receives, and the error at the end.
func drain(p *member) (string, error) {
	var b strings.Builder
	for {
		m, err := p.Recv()
		if err != nil {
			return b.String(), err
		}
		b.Write(m.Initial[0])
	}
}

func streamText(n int) string {
	var b strings.Builder
	for i := 1; i <= 20; i++ {
		fmt.Fprintf(&b, "%d.%d ", n, i)
	}
	return b.String()
}

func (s *fakeSource) join(t *testing.T, h *Hub) (*member, func()) {
	t.Helper()
	p, leave, err := h.joinInitialEvents(t.Context(), "pods", &watchfanoutv1.WatchRequest{ResourceVersion: "0"})
	if err != nil {
		t.Fatal(err)
	}
	return p, leave
}

// Watches that arrive while a stream has no first frame share the next stream, which starts after they have joined.
// Each receives all of it, at its own pace while the buffer has space. No frame is retained after all have received it.
func TestConcurrentWatchesShareInitialEvents(t *testing.T) {
	s := newSource()
	h := s.hub()
	first, leave := s.join(t, h)
	<-s.started
	var others []*member
	var leaves []func()
	lastJoin := time.Now()
	for range 50 {
		p, l := s.join(t, h)
		others, leaves = append(others, p), append(leaves, l)
		lastJoin = time.Now()
	}
	close(s.stream(0).release)
	<-s.started
	if s.streamCount() != 2 || s.stream(1).openedAt.Before(lastJoin) {
		t.Errorf("%d streams, the second %v after the last join", s.streamCount(), s.stream(1).openedAt.Sub(lastJoin))
	}
	close(s.stream(1).release)
	if got, err := drain(first); got != streamText(0) || status.Code(err) != codes.Unavailable {
		t.Errorf("%s, %v", got, err)
	}
	leave()
	slow, fast := others[0], others[1:]
	if m, err := slow.Recv(); err != nil || string(m.Initial[0]) != "1.1 " {
		t.Errorf("%v, %v", m, err)
	}
	var wg sync.WaitGroup
	for i, p := range fast {
		wg.Go(func() {
			if i%7 == 3 { // some leave during the stream
				_, _ = p.Recv()
			} else if got, err := drain(p); got != streamText(1) || status.Code(err) != codes.Unavailable {
				t.Errorf("%d: %s, %v", i, got, err)
			}
			leaves[i+1]()
		})
	}
	wg.Wait()
	if held := h.bufferedBytes.Load(); held == 0 {
		t.Error("nothing is buffered for the slowest")
	}
	if got, _ := drain(slow); "1.1 "+got != streamText(1) {
		t.Errorf("the slowest received %s", got)
	}
	leaves[0]()
	if held := h.bufferedBytes.Load(); held != 0 {
		t.Errorf("%d bytes are kept for nobody", held)
	}
	if n := len(h.initialEvents); n != 0 {
		t.Errorf("%d queues remain", n)
	}
	s.join(t, h) // a single member again
	<-s.started
}

// An unresponsive stream delays the next stream only briefly, and a stream without members is ended.
func TestUnresponsiveInitialEventsDoNotBlock(t *testing.T) {
	s := newSource()
	h := s.hub()
	h.startDelay = time.Millisecond
	unresponsive, leave := s.join(t, h)
	<-s.started
	p, leaveNext := s.join(t, h)
	<-s.started
	close(s.stream(1).release)
	if got, _ := drain(p); got != streamText(1) {
		t.Errorf("%s", got)
	}
	leaveNext()
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	unresponsive.ctx = ctx
	go func() { _, err := unresponsive.Recv(); ended <- err }()
	cancel()
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	leave()
	<-s.stream(0).ctx.Done()
	// all leave before it starts
	_, leave = s.join(t, h)
	<-s.started
	_, leaveNext = s.join(t, h)
	leaveNext()
	close(s.stream(2).release)
	<-s.started
	<-s.stream(3).ctx.Done()
	leave()
}

// fullInitialEvents returns two members of a stream, with a buffer for a single frame. An earlier stream has another
// member. leave removes all three.
func fullInitialEvents(t *testing.T) (h *Hub, slow, fast *member, leave func()) {
	t.Helper()
	s := newSource()
	h = s.hub()
	h.Config.BroadcastTotalBytes = 10
	_, leaveFirst := s.join(t, h)
	<-s.started
	slow, leaveSlow := s.join(t, h)
	fast, leaveFast := s.join(t, h)
	close(s.stream(0).release)
	<-s.started
	close(s.stream(1).release)
	return h, slow, fast, func() {
		leaveSlow()
		leaveFast()
		leaveFirst()
	}
}

// When the buffer is full, the stream proceeds at the pace of its slowest member.
func TestInitialEventsBufferIsBounded(t *testing.T) {
	_, slow, fast, leave := fullInitialEvents(t)
	got := make(chan string, 1)
	go func() { data, _ := drain(fast); got <- data }()
	e := slow.initialEvents
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		e.mu.Lock()
		retained, blocked := len(e.frames), e.overQuota() && fast.nextFrame == e.base+len(e.frames)
		e.mu.Unlock()
		if retained > readAheadFrames+1 || blocked || time.Now().After(until) {
			if !blocked {
				t.Errorf("%d frames are buffered", retained)
			}
			break
		}
	}
	if data, _ := drain(slow); data != streamText(1) || <-got != streamText(1) {
		t.Errorf("the slow member received %s", data)
	}
	leave()
}

// While the buffer is full, the slowest member does not delay the others for long. It is evicted, and the stream
// continues.
func TestSlowestMemberIsEvicted(t *testing.T) {
	h, slow, fast, leave := fullInitialEvents(t)
	if m, err := slow.Recv(); err != nil || string(m.Initial[0]) != "1.1 " {
		t.Fatalf("%v, %v", m, err)
	}
	got := make(chan string, 1)
	go func() { data, _ := drain(fast); got <- data }()
	e, base := slow.initialEvents, 0
	waitFor(t, "no member is blocked", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		base = e.base
		return e.evictTimer != nil && fast.nextFrame == base+len(e.frames)
	})
	e.evict(base - 1) // the member has since received that frame
	e.evict(base)
	if data := <-got; data != streamText(1) {
		t.Errorf("the fast member received %s", data)
	}
	if m, err := slow.Recv(); status.Code(err) != codes.Unavailable || m != nil {
		t.Errorf("%v, %v", m, err)
	}
	leave()
	if held := h.bufferedBytes.Load(); held != 0 {
		t.Errorf("%d bytes are kept for nobody", held)
	}
}

// Members that are equally slow delay no other, and none is evicted.
func TestMembersThatDelayNoOtherStay(t *testing.T) {
	_, one, other, leave := fullInitialEvents(t)
	for _, p := range []*member{one, other} {
		if m, err := p.Recv(); err != nil || string(m.Initial[0]) != "1.1 " {
			t.Fatalf("%v, %v", m, err)
		}
	}
	e := one.initialEvents
	waitFor(t, "the buffer is not full", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.evictTimer != nil && e.overQuota() && e.base == 1 // both have the first frame
	})
	e.evict(1)
	got := make(chan string, 1)
	go func() { data, _ := drain(other); got <- data }()
	want := strings.TrimPrefix(streamText(1), "1.1 ")
	if data, _ := drain(one); data != want || <-got != want {
		t.Errorf("a member received %s", data)
	}
	leave()
}

// A stream has the values of its first member's request, such as the trace, and not of an earlier stream's member.
func TestAStreamHasTheContextOfItsMember(t *testing.T) {
	type key struct{}
	s := newSource()
	h := s.hub()
	for n := range 3 {
		ctx := context.WithValue(t.Context(), key{}, n)
		_, leave, err := h.joinInitialEvents(ctx, "pods", &watchfanoutv1.WatchRequest{ResourceVersion: "0"})
		if err != nil {
			t.Fatal(err)
		}
		defer leave()
		if n > 0 {
			close(s.stream(n - 1).release)
		}
		<-s.started
		if got := s.stream(n).ctx.Value(key{}); got != n {
			t.Errorf("stream %d has the context of member %v", n, got)
		}
	}
}

// Long initial events wait for a turn. The turn ends while the next frame is not there.
func TestLongInitialEventsTakeTurns(t *testing.T) {
	s := newSource()
	s.padding = strings.Repeat("x", turns.LongBytes)
	h := s.hub()
	h.Config.WriteTimeout, h.Turns = time.Second, turns.New(1, time.Hour)
	other, ctx := h.Turns.NewTurn(t.Context(), "other")
	if err := other.Take(ctx); err != nil {
		t.Fatal(err)
	}
	c := h.watch(t, func(r *Request) { r.ResourceVersion = "0" })
	<-s.started
	stream := s.stream(0)
	more := make(chan struct{})
	stream.total, stream.more = 2, more
	close(stream.release)
	for h.Turns.Waiting() == 0 {
		time.Sleep(time.Millisecond) // between polls: nothing signals that a response waits
	}
	if len(c.changed) > 0 {
		t.Error("the events do not wait")
	}
	other.Yield()
	<-c.changed
	if err := other.Take(ctx); err != nil { // while the watch waits for its second frame
		t.Fatal(err)
	}
	other.Yield()
	close(more)
	<-c.changed
}
