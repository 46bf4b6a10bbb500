package watch

import (
	"context"
	"math/rand/v2"
	"sync"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// replicaStream is a stream from a replica of the watch tier.
type replicaStream struct {
	sharedStream
	cancel context.CancelFunc

	mu sync.Mutex
	// firstFrame was received before the stream replaced another. next is the successor. ended: no stream may replace
	// this stream any longer.
	firstFrame *watchfanoutv1.WatchFrame
	next       *replicaStream
	ended      bool
}

// sharedStream is the stream of a broadcast. Its context has the replica as gRPC's peer.
type sharedStream interface {
	Recv() (*watchfanoutv1.WatchFrame, error)
	Context() context.Context
}

// openReplica opens a stream that resumes after the broadcast's position. When its replica no longer owns the resource,
// reassign opens a stream to the new owner, which replaces this stream.
func (b *watchBroadcast) openReplica(ctx context.Context) (*replicaStream, error) {
	streamCtx, cancel := context.WithCancel(ctx)
	s := &replicaStream{cancel: cancel}
	var err error
	s.sharedStream, err = b.openStream(streamCtx, b.request(), func() {
		pause := rand.N(reassignJitter)
		for lifecycle.Sleep(streamCtx, pause) == nil && !b.reassign(ctx, streamCtx, s) {
			pause = min(2*pause+minRetryDelay, resumeTimeout)
		}
	})
	if err != nil {
		cancel()
		return nil, err
	}
	return s, nil
}

// request returns the request for a stream that resumes after the broadcast's position. Replicas must not change the
// query, because all requests share it.
func (b *watchBroadcast) request() *watchfanoutv1.WatchRequest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &watchfanoutv1.WatchRequest{
		Query:             b.query,
		ResumeAfter:       b.High.Proto(),
		AllowBookmarks:    true,
		SendInitialEvents: new(bool),
		ColumnsSent:       true,
		InitialEventsDone: true,
		Owner:             b.owner,
	}
}

// openStream opens a stream in a call of Watches, if the source has that method and the broadcast is not too slow for
// it.
func (b *watchBroadcast) openStream(ctx context.Context, r *watchfanoutv1.WatchRequest, onReassign func()) (
	sharedStream, error) {
	h := b.hub
	if client, ok := h.Client.(multiplexedWatcher); ok && !b.overflowed.Load() {
		return h.multiplexer.open(ctx, client, b.storageResource, r, onReassign), nil
	}
	return h.openStream(rpc.WithReassignment(ctx, b.storageResource, onReassign), r)
}

// park lets the stream's next frame call ready in a new goroutine. It returns false if a frame is there already, or the
// stream needs a goroutine.
func (s *replicaStream) park(ready func()) bool {
	m, ok := s.sharedStream.(*multiplexedStream)
	return ok && m.park(ready)
}

// reassignJitter spreads broadcasts that move at the same time. A replica that shuts down serves longer than this.
const reassignJitter = rpc.LameDuckPeriod / 2

// reassign opens a stream to the replica that owns the resource now. The new stream replaces s after its first frame,
// which proves that the replica holds the next event. streamCtx is the context of s.
func (b *watchBroadcast) reassign(ctx, streamCtx context.Context, s *replicaStream) bool {
	next, err := b.openReplica(ctx)
	if err != nil {
		return false
	}
	stop := context.AfterFunc(streamCtx, next.cancel) // s is broken; run opens a new stream
	next.firstFrame, err = next.Recv()
	if err != nil || next.firstFrame.End || !stop() || !s.replaceWith(next) {
		next.cancel()
		if successor := next.successor(); successor != nil { // the resource has moved again
			successor.cancel()
		}
		return false
	}
	reassignments.Inc()
	return true
}

// replaceWith ends s and makes next its successor. It returns false if s is broken or has a successor.
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

// successor returns the stream that replaces s, which has ended.
func (s *replicaStream) successor() *replicaStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.next
}
