package watch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// openCalls returns the calls that have not ended.
func (t *fakeTier) openCalls() (open int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.calls {
		if c.ctx.Err() == nil {
			open++
		}
	}
	return open
}

// waitFor waits until condition is true.
func waitFor(t *testing.T, failure string, condition func() bool) {
	t.Helper()
	for until := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal(failure)
		}
	}
}

// Broadcasts share calls, and an idle broadcast has no goroutine. They resume after the calls break.
func TestBroadcastsShareCalls(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	const watches = 50
	var clients []*client
	for i := range watches {
		unique := func(r *Request) { r.Query.FieldSelector = fmt.Sprint("metadata.name=", i) }
		clients = append(clients, h.watch(t, unique))
	}
	for _, c := range clients {
		c.expect(t, "e6 ")
	}
	h.waitForReceivers(t, watches)
	up.waitForOpen(t, watches)
	if n := up.openCalls(); n != callsPerOwner {
		t.Errorf("%d calls", n)
	}
	up.write(7)
	for _, c := range clients {
		c.expect(t, "e6 e7 ")
	}
	stacks := make([]byte, 4<<20)
	waitFor(t, "idle broadcasts have goroutines", func() bool {
		return !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("(*watchBroadcast).run"))
	})
	for _, c := range clients[1:] {
		c.cancel()
	}
	up.waitForOpen(t, 1)
	up.write(8)
	clients[0].expect(t, "e6 e7 e8 ")
	up.breakStreams()
	up.write(9)
	clients[0].expect(t, "e6 e7 e8 e9 ")
	clients[0].cancel()
	up.waitForOpen(t, 0)
}

// A broadcast moves away from a call whose replica drains. The call ends with its last broadcast.
func TestACallOfADrainingReplicaEnds(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	a := h.watch(t, nil)
	a.expect(t, "e6 ")
	up.waitForStreams(t, 2)
	up.mu.Lock()
	first := up.calls[0]
	up.mu.Unlock()
	first.frames <- &watchfanoutv1.WatchFrame{
		WatchId: 1,
		Status:  &watchfanoutv1.WatchStatus{Code: int32(codes.Unavailable), Unready: true},
	}
	select {
	case <-first.ctx.Done():
	case <-time.After(2 * time.Minute):
		t.Fatal("the call does not end")
	}
	up.write(7)
	a.expect(t, "e6 e7 ")
	if n := up.openCalls(); n != 1 {
		t.Errorf("%d calls are open", n)
	}
}

// Owners share no call. A broadcast that is slower than its call delays no other: it receives the frames of its queue,
// and continues with a call of Watch.
func TestASlowBroadcastLeavesItsCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up, m := newTier(), &multiplexer{}
		request := func(owner string) *watchfanoutv1.WatchRequest {
			return &watchfanoutv1.WatchRequest{ResumeAfter: &watchfanoutv1.Position{}, Owner: owner}
		}
		slow := m.open(t.Context(), up, "pods", request("a"), func() {})
		other := m.open(t.Context(), up, "pods", request("a"), func() {})
		tenant := m.open(t.Context(), up, "pods", request("b"), func() {})
		if other.call != slow.call || tenant.call == slow.call {
			t.Error("the calls are not of the owners")
		}
		const frames = 2 * streamFrames
		for i := range int64(frames) {
			up.write(10*i + 1)
			synctest.Wait()
			for _, s := range []*multiplexedStream{other, tenant} {
				if f, err := s.Recv(); err != nil || i > 0 && f.Position.Revision != 10*(i-1)+1 {
					t.Fatalf("frame %d is %v, %v", i, f, err)
				}
			}
		}
		received := 0
		for {
			_, err := slow.Recv()
			if err == errOverflow { //nolint:errorlint // it is never wrapped
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			received++
		}
		if received != streamFrames {
			t.Errorf("%d frames are received", received)
		}
		large := &watchfanoutv1.WatchFrame{WatchId: other.id, Data: make([]byte, streamBytes)}
		for len(other.queue) > 0 {
			if _, err := other.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		other.call.deliver(large)
		if other.err != nil {
			t.Errorf("a large frame ends the stream: %v", other.err)
		}
		other.call.deliver(large)
		if other.err != errOverflow { //nolint:errorlint // it is never wrapped
			t.Errorf("%d bytes wait", other.bytes)
		}
		time.Sleep(idleCallTimeout)
		synctest.Wait()
		if n := up.openCalls(); n != 1 {
			t.Errorf("%d calls are open", n)
		}
		if other.call.open(t.Context(), request("a"), func() {}) != nil {
			t.Error("an ended call opens a stream")
		}
		tenant.call.ended(status.Error(codes.Internal, "a message is too large"))
		for {
			if _, err := tenant.Recv(); err != nil {
				if status.Code(err) != codes.Unavailable {
					t.Errorf("the stream of an ended call ends with %v", err)
				}
				break
			}
		}
	})
}

// A broadcast that has left its call receives every event.
func TestABroadcastAfterAnOverflow(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	a := h.watch(t, nil)
	a.expect(t, "e6 ")
	h.waitForReceivers(t, 1)
	h.mu.Lock()
	for _, b := range h.broadcasts {
		s := b.openedStream(t, up)
		s.call.mu.Lock()
		s.leave(errOverflow)
		s.call.mu.Unlock()
	}
	h.mu.Unlock()
	up.waitForStreams(t, 3)
	up.write(7)
	a.expect(t, "e6 e7 ")
	up.waitForOpen(t, 1)
}

// openedStream returns the broadcast's only stream.
func (b *watchBroadcast) openedStream(t *testing.T, up *fakeTier) *multiplexedStream {
	t.Helper()
	up.waitForStreams(t, 2)
	m := &b.hub.multiplexer
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, calls := range m.calls {
		for _, s := range calls[0].streams {
			return s
		}
	}
	t.Fatal("no stream is open")
	return nil
}

// A replica that does not accept a call delays no other resource, and no stream's end.
func TestACallThatDoesNotBegin(t *testing.T) {
	blocked := make(chan struct{})
	defer close(blocked)
	m := &multiplexer{}
	ctx, cancel := context.WithCancel(t.Context())
	s := m.open(ctx, &blockedTier{blocked}, "pods", &watchfanoutv1.WatchRequest{}, func() {})
	up := newTier()
	up.write(6)
	other := m.open(t.Context(), up, "nodes", &watchfanoutv1.WatchRequest{}, func() {})
	if _, err := other.Recv(); err != nil {
		t.Error(err)
	}
	cancel()
	if _, err := s.Recv(); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}

type blockedTier struct{ c chan struct{} }

func (b *blockedTier) Watches(context.Context, ...grpc.CallOption) (
	grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame], error) {
	<-b.c
	return nil, status.Error(codes.Unavailable, "no replica")
}

// The status of a watch ends its stream, and a malformed frame does.
func TestTheEndOfAStream(t *testing.T) {
	malformed := &watchfanoutv1.WatchFrame{Boundaries: []*watchfanoutv1.EventBoundary{{End: 1}}}
	ended := func(code codes.Code) *watchfanoutv1.WatchFrame {
		return &watchfanoutv1.WatchFrame{Status: &watchfanoutv1.WatchStatus{Code: int32(code), Message: "m"}}
	}
	if err := endOf(ended(codes.OK)); err != io.EOF { //nolint:errorlint // as gRPC returns it
		t.Error(err)
	}
	if err := endOf(ended(codes.NotFound)); status.Code(err) != codes.NotFound || status.Convert(err).Message() != "m" {
		t.Error(err)
	}
	if err := endOf(malformed); status.Code(err) != codes.Internal {
		t.Error(err)
	}
	if err := endOf(&watchfanoutv1.WatchFrame{}); err != nil {
		t.Error(err)
	}
}
