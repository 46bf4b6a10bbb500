package watch

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/watchable"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// streamFrames and streamBytes bound the frames of a stream's queue.
const (
	streamFrames = 64
	streamBytes  = 512 << 10
)

// errOverflow ends the stream of a broadcast that is slower than its call.
var errOverflow = status.Error(codes.Unavailable, "the broadcast is too slow for a shared call")

// multiplexedStream is a broadcast's stream in a call. The call's lock guards it.
type multiplexedStream struct {
	call       *multiplexedCall
	id         uint64
	onReassign func()

	queue []*watchfanoutv1.WatchFrame
	bytes int   // of queue
	err   error // the end, after the frames of queue
	// ready is called once, in a new goroutine, when there is a frame or the end (park).
	ready func()
	// changed wakes Recv.
	changed watchable.Signal
}

// Context implements sharedStream.
func (s *multiplexedStream) Context() context.Context {
	s.call.mu.Lock()
	defer s.call.mu.Unlock()
	return s.call.stream.Context()
}

// push queues a frame, or ends the stream if the queue is full. The lock is held.
func (s *multiplexedStream) push(m *watchfanoutv1.WatchFrame) {
	if n := len(s.queue); n > 0 && (n >= streamFrames || s.bytes+len(m.Data) > streamBytes) {
		s.leave(errOverflow)
		return
	}
	s.queue = append(s.queue, m)
	s.bytes += len(m.Data)
	s.notify()
}

// leave ends the stream before the replica does. The lock is held.
func (s *multiplexedStream) leave(err error) {
	if s.end(err) {
		s.call.request(&watchfanoutv1.WatchesRequest{WatchId: s.id})
	}
}

// end ends the stream. It returns false if the stream has ended before. The lock is held.
func (s *multiplexedStream) end(err error) bool {
	if s.err != nil {
		return false
	}
	s.err = err
	c := s.call
	delete(c.streams, s.id)
	if len(c.streams) == 0 && !c.retired {
		time.AfterFunc(idleCallTimeout, c.retireIfUnused)
	}
	c.cancelIfUnused()
	s.notify()
	return true
}

// notify starts the broadcast's goroutine. The lock is held.
func (s *multiplexedStream) notify() {
	s.changed.Notify()
	if s.ready != nil {
		go s.ready()
		s.ready = nil
	}
}

// park lets the next frame, or the end, call ready in a new goroutine. It returns false if there is a frame or the end.
func (s *multiplexedStream) park(ready func()) bool {
	s.call.mu.Lock()
	defer s.call.mu.Unlock()
	if len(s.queue) > 0 || s.err != nil {
		return false
	}
	s.ready = ready
	return true
}

// Recv waits for the next frame.
func (s *multiplexedStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	for {
		s.call.mu.Lock()
		if len(s.queue) > 0 {
			m := s.queue[0]
			s.queue[0] = nil
			s.bytes -= len(m.Data)
			if s.queue = s.queue[1:]; len(s.queue) == 0 {
				s.queue = nil
			}
			s.call.mu.Unlock()
			return m, nil
		}
		err, changed := s.err, s.changed.C()
		s.call.mu.Unlock()
		if err != nil {
			return nil, err
		}
		<-changed
	}
}
