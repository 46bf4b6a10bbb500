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
	for until := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal(failure)
		}
	}
}

// Broadcasts share calls, and an idle broadcast has no goroutine. A call ends with its last broadcast if the replica
// no longer serves the resource.
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
	if n := up.openCalls(); n != callsPerResource {
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
		Status:  &watchfanoutv1.WatchStatus{Code: int32(codes.Unavailable)},
	}
	select {
	case <-first.ctx.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the call does not end")
	}
	up.write(7)
	a.expect(t, "e6 e7 ")
	if n := up.openCalls(); n != 1 {
		t.Errorf("%d calls are open", n)
	}
}

// Each broadcast has a call of Watch while a replica of an older release lacks Watches.
func TestAReplicaWithoutWatches(t *testing.T) {
	unimplemented := status.Error(codes.Unimplemented, "unknown method Watches")
	for name, up := range map[string]*fakeTier{
		"in the same process": {watchesError: unimplemented},
		"another process":     {recvError: unimplemented},
	} {
		t.Run(name, func(t *testing.T) {
			up.changed, up.broken = make(chan struct{}), make(chan struct{})
			up.write(6)
			h := hub(up)
			a := h.watch(t, nil)
			a.expect(t, "e6 ")
			h.waitForReceivers(t, 1)
			waitFor(t, "no call is tried", func() bool { return !h.multiplexer.supported() })
			up.write(7)
			a.expect(t, "e6 e7 ")
			if n := up.openCalls(); n != 0 {
				t.Errorf("%d calls are open", n)
			}
		})
	}
}

// A call waits for a broadcast that does not receive, and then loses no frame. It ends without waiting for it.
func TestACallWaitsForASlowBroadcast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up, m := newTier(), &multiplexer{}
		ctx, cancel := context.WithCancel(t.Context())
		request := &watchfanoutv1.WatchRequest{ResumeAfter: &watchfanoutv1.Position{}}
		s, err := m.open(ctx, up, "pods", request, func() {})
		if err != nil {
			t.Fatal(err)
		}
		const frames = 2 * streamFrames
		for i := range int64(frames) {
			up.write(10*i + 1)
		}
		synctest.Wait()
		if n := len(s.queue); n != streamFrames {
			t.Errorf("%d frames are in the queue", n)
		}
		for i := range int64(frames + 1) {
			f, err := s.Recv()
			if err != nil || i > 0 && f.Position.Revision != 10*(i-1)+1 {
				t.Fatalf("frame %d is %v, %v", i, f, err)
			}
		}
		for i := range int64(frames) {
			up.write(10*(frames+i) + 1)
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		for err = nil; err == nil; {
			_, err = s.Recv()
		}
		if status.Code(err) != codes.Canceled {
			t.Error(err)
		}
		m.retire(s.call)
		synctest.Wait()
		if up.openCalls() != 0 {
			t.Error("a call without streams stays open")
		}
		if s.call.open(t.Context(), request, func() {}).err == nil {
			t.Error("an ended call opens a stream")
		}
	})
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
