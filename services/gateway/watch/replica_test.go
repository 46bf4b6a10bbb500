package watch

import (
	"fmt"
	"testing"
	"time"

	"watershed.dev/platform/rpc"
)

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
		case <-time.After(2 * time.Minute):
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
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
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
