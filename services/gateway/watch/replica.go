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
	// firstFrame has been received before it was used. next takes over; over says that nobody does any more.
	firstFrame *watchfanoutv1.WatchFrame
	next       *replicaStream
	ended      bool
}

// openReplica begins a stream after where the feed is. When its replica does not serve the resource any more, another is
// opened beside it and takes over.
func (b *watchBroadcast) openReplica(ctx context.Context, r *watchfanoutv1.WatchRequest) (*replicaStream, error) {
	streamCtx, cancel := context.WithCancel(ctx)
	s := &replicaStream{cancel: cancel}
	request := proto.Clone(r).(*watchfanoutv1.WatchRequest)
	b.mu.Lock()
	request.ResumeAfter = b.high.Proto()
	b.mu.Unlock()
	watchCtx := rpc.WithReassignment(streamCtx, b.storageResource, func() {
		pause := rand.N(reassignJitter)
		for sleep(streamCtx, pause) && !b.reassign(ctx, streamCtx, s, r) {
			pause = min(2*pause+minRetryDelay, resumeTimeout)
		}
	})
	var err error
	if s.ServerStreamingClient, err = b.hub.Client.Watch(watchCtx, request, grpc.WaitForReady(false)); err != nil {
		cancel()
		return nil, err
	}
	return s, nil
}

// reassignJitter is over how long feeds move that are to move at the same time. A replica that goes serves on for longer.
const reassignJitter = rpc.LameDuckPeriod / 2

// sleep is false if ctx ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// reassign opens a stream at a replica that serves the resource now and has it take over from s once its first frame has
// come: that replica has what comes next. own is s' context.
func (b *watchBroadcast) reassign(
	ctx, streamCtx context.Context,
	s *replicaStream,
	r *watchfanoutv1.WatchRequest,
) bool {
	next, err := b.openReplica(ctx, r)
	if err != nil {
		return false
	}
	stop := context.AfterFunc(streamCtx, next.cancel) // s has broken off, and is begun anew by itself
	next.firstFrame, err = next.Recv()
	if err != nil || next.firstFrame.End || !stop() || !s.replaceWith(next) {
		next.cancel()
		if successor := next.successor(); successor != nil { // its resource has moved on meanwhile
			successor.cancel()
		}
		return false
	}
	reassignments.Inc()
	return true
}

// replaceWith ends s, with next to go on; false where s has broken off, or another goes on.
func (s *replicaStream) replaceWith(next *replicaStream) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.next != nil {
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
	s.ended = true
	return s.next
}
