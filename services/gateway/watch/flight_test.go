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
)

// source answers each stream with frames that say which stream it is; the frames of a stream come when it may go.
type source struct {
	mu    sync.Mutex
	open  []*departure
	begun chan struct{} // one for each stream
}

type departure struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	ctx   context.Context
	at    time.Time
	n     int
	goes  chan struct{} // closed when it may answer
	total int
	sent  int
	err   error
}

func newSource() *source { return &source{begun: make(chan struct{}, 1000)} }

func (s *source) Watch(ctx context.Context, _ *watchfanoutv1.WatchRequest,
	_ ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &departure{
		ctx:   ctx,
		at:    time.Now(),
		n:     len(s.open),
		goes:  make(chan struct{}),
		total: 20,
		err:   status.Error(codes.Unavailable, "killed"),
	}
	s.open = append(s.open, d)
	s.begun <- struct{}{}
	return d, nil
}

func (d *departure) Recv() (*watchfanoutv1.WatchFrame, error) {
	select {
	case <-d.goes:
	case <-d.ctx.Done():
		return nil, status.FromContextError(d.ctx.Err()).Err()
	}
	if d.sent == d.total {
		return nil, d.err
	}
	d.sent++
	return &watchfanoutv1.WatchFrame{Initial: [][]byte{fmt.Appendf(nil, "%d.%d ", d.n, d.sent)}}, nil
}

func (s *source) stream(n int) *departure {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[n]
}

func (s *source) streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

func (s *source) hub() *Hub {
	return &Hub{Client: s, Config: &Config{FeedsBytes: 1 << 20}, takeOff: time.Minute}
}

// all is everything that one is sent, and how it ends.
func all(p *passenger) (string, error) {
	var b strings.Builder
	for {
		m, err := p.Recv()
		if err != nil {
			return b.String(), err
		}
		b.Write(m.Initial[0])
	}
}

func whole(n int) string {
	var b strings.Builder
	for i := 1; i <= 20; i++ {
		fmt.Fprintf(&b, "%d.%d ", n, i)
	}
	return b.String()
}

func (s *source) board(t *testing.T, h *Hub) (*passenger, func()) {
	t.Helper()
	p, leave, err := h.board(t.Context(), "pods", &watchfanoutv1.WatchRequest{ResourceVersion: "0"})
	if err != nil {
		t.Fatal(err)
	}
	return p, leave
}

// Those who ask while a stream has not answered share the next one, which begins after they have asked; each has all of
// it, at its own pace while there is room, and nothing is kept when all have it.
func TestThoseWhoBeginAtOnceShareOneStream(t *testing.T) {
	s := newSource()
	h := s.hub()
	first, leave := s.board(t, h)
	<-s.begun
	var others []*passenger
	var leaves []func()
	asked := time.Now()
	for range 50 {
		p, l := s.board(t, h)
		others, leaves = append(others, p), append(leaves, l)
		asked = time.Now()
	}
	close(s.stream(0).goes)
	<-s.begun
	if s.streams() != 2 || s.stream(1).at.Before(asked) {
		t.Errorf("%d streams, the second %v after the last one has asked", s.streams(), s.stream(1).at.Sub(asked))
	}
	close(s.stream(1).goes)
	if got, err := all(first); got != whole(0) || status.Code(err) != codes.Unavailable {
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
			if i%7 == 3 { // some leave amid it
				_, _ = p.Recv()
			} else if got, err := all(p); got != whole(1) || status.Code(err) != codes.Unavailable {
				t.Errorf("%d: %s, %v", i, got, err)
			}
			leaves[i+1]()
		})
	}
	wg.Wait()
	if held := h.flown.Load(); held == 0 {
		t.Error("nothing is kept for the slowest")
	}
	if got, _ := all(slow); "1.1 "+got != whole(1) {
		t.Errorf("the slowest has %s", got)
	}
	leaves[0]()
	if held := h.flown.Load(); held != 0 {
		t.Errorf("%d bytes are kept for nobody", held)
	}
	if n := len(h.flights); n != 0 {
		t.Errorf("%d questions are waited for", n)
	}
	s.board(t, h) // by itself again
	<-s.begun
}

// A stream that does not answer keeps those after it for a moment only, and one that everybody has left is ended.
func TestAFlightThatDoesNotAnswerIsNotWaitedFor(t *testing.T) {
	s := newSource()
	h := s.hub()
	h.takeOff = time.Millisecond
	hangs, leave := s.board(t, h)
	<-s.begun
	p, leaveNext := s.board(t, h)
	<-s.begun
	close(s.stream(1).goes)
	if got, _ := all(p); got != whole(1) {
		t.Errorf("%s", got)
	}
	leaveNext()
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	hangs.ctx = ctx
	go func() { _, err := hangs.Recv(); ended <- err }()
	cancel()
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	leave()
	<-s.stream(0).ctx.Done()
	// all leave before it begins
	_, leave = s.board(t, h)
	<-s.begun
	_, leaveNext = s.board(t, h)
	leaveNext()
	close(s.stream(2).goes)
	<-s.begun
	<-s.stream(3).ctx.Done()
	leave()
}

// crowdedFlight is one with two in it and room for a frame, after one that its first has for himself. leave ends all
// three's parts.
func crowdedFlight(t *testing.T) (h *Hub, slow, fast *passenger, leave func()) {
	t.Helper()
	s := newSource()
	h = s.hub()
	h.Config.FeedsBytes = 10
	_, leaveFirst := s.board(t, h)
	<-s.begun
	slow, leaveSlow := s.board(t, h)
	fast, leaveFast := s.board(t, h)
	close(s.stream(0).goes)
	<-s.begun
	close(s.stream(1).goes)
	return h, slow, fast, func() {
		leaveSlow()
		leaveFast()
		leaveFirst()
	}
}

// Where all flights keep as much as they may, the slowest says how fast one goes.
func TestAFlightKeepsNoMoreThanThereIsRoomFor(t *testing.T) {
	_, slow, fast, leave := crowdedFlight(t)
	got := make(chan string, 1)
	go func() { data, _ := all(fast); got <- data }()
	f := slow.flight
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		kept, most := len(f.kept), f.crowded() && fast.at == f.base+len(f.kept)
		f.mu.Unlock()
		if kept > framesAhead+1 || most || time.Now().After(until) {
			if !most {
				t.Errorf("%d frames are kept", kept)
			}
			break
		}
	}
	if data, _ := all(slow); data != whole(1) || <-got != whole(1) {
		t.Errorf("the slow one has %s", data)
	}
	leave()
}

// The slowest does not keep the others waiting for long where there is no room: its part ends, and theirs goes on.
func TestTheSlowestLeavesAFullFlight(t *testing.T) {
	h, slow, fast, leave := crowdedFlight(t)
	if m, err := slow.Recv(); err != nil || string(m.Initial[0]) != "1.1 " {
		t.Fatalf("%v, %v", m, err)
	}
	got := make(chan string, 1)
	go func() { data, _ := all(fast); got <- data }()
	f := slow.flight
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		waits := f.late != nil && fast.at == f.base+len(f.kept)
		base := f.base
		f.mu.Unlock()
		if waits {
			f.throwOut(base - 1) // it has moved on since
			f.throwOut(base)
			break
		}
		if time.Now().After(until) {
			t.Fatal("nobody waits")
		}
	}
	if data := <-got; data != whole(1) {
		t.Errorf("the fast one has %s", data)
	}
	if m, err := slow.Recv(); status.Code(err) != codes.Unavailable || m != nil {
		t.Errorf("%v, %v", m, err)
	}
	leave()
	if held := h.flown.Load(); held != 0 {
		t.Errorf("%d bytes are kept for nobody", held)
	}
}
