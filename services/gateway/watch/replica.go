package watch

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/rpc"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// replicaStream is a stream from one replica of the watch tier.
type replicaStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	cancel context.CancelFunc

	mu sync.Mutex
	// first has been received before it was used. next takes over; over says that nobody does any more.
	first *watchfanoutv1.WatchFrame
	next  *replicaStream
	over  bool
}

// open begins a stream after where the feed is. When its replica does not serve the resource any more, another is
// opened beside it and takes over.
func (f *feed) open(ctx context.Context, r *watchfanoutv1.WatchRequest) (*replicaStream, error) {
	own, cancel := context.WithCancel(ctx)
	s := &replicaStream{cancel: cancel}
	request := proto.Clone(r).(*watchfanoutv1.WatchRequest)
	f.mu.Lock()
	request.ResumeAfter = f.high.Proto()
	f.mu.Unlock()
	placed := rpc.WithReassignment(own, f.storedAs, func() {
		pause := rand.N(moveWithin)
		for sleep(own, pause) && !f.move(ctx, own, s, r) {
			pause = min(2*pause+retryAfter, heldOpen)
		}
	})
	var err error
	if s.ServerStreamingClient, err = f.hub.Client.Watch(placed, request, grpc.WaitForReady(false)); err != nil {
		cancel()
		return nil, err
	}
	return s, nil
}

// moveWithin is over how long feeds move that are to move at the same time. A replica that goes serves on for longer.
const moveWithin = rpc.LameDuckPeriod / 2

// sleep is false if ctx ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// move opens a stream at a replica that serves the resource now and has it take over from s once its first frame has
// come: that replica has what comes next. own is s' context.
func (f *feed) move(ctx, own context.Context, s *replicaStream, r *watchfanoutv1.WatchRequest) bool {
	next, err := f.open(ctx, r)
	if err != nil {
		return false
	}
	stop := context.AfterFunc(own, next.cancel) // s has broken off, and is begun anew by itself
	next.first, err = next.Recv()
	if err != nil || next.first.End || !stop() || !s.handOver(next) {
		next.cancel()
		if another := next.successor(); another != nil { // its resource has moved on meanwhile
			another.cancel()
		}
		return false
	}
	moves.Inc()
	return true
}

// handOver ends s, with next to go on; false where s has broken off, or another goes on.
func (s *replicaStream) handOver(next *replicaStream) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over || s.next != nil {
		return false
	}
	s.next = next
	s.cancel()
	return true
}

// successor is what goes on after s, which has ended.
func (s *replicaStream) successor() *replicaStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	return s.next
}
