package watch

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchable"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A stream of gRPC costs about 30 KB at its two ends, and most broadcasts are idle: each kubelet watches its own
// Secrets. So broadcasts share calls of Watches, and an idle broadcast has no goroutine.
//
//	replica ══ call of Watches ══► goroutine of receive ──► multiplexedStream's queue ──► goroutine of the broadcast

const (
	// callsPerResource is the number of calls for the broadcasts of a stored resource. Two replicas serve a resource,
	// and usually each has a call.
	callsPerResource = 2
	// streamFrames is how many frames a broadcast may be behind. The whole call then waits for it.
	streamFrames = 32
)

// MultiplexedWatcher is a Watcher that carries many watches in a call.
type MultiplexedWatcher interface {
	Watches(context.Context, ...grpc.CallOption) (
		grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame], error)
}

// multiplexer has the calls for the broadcasts of a hub. Its zero value is ready to use.
type multiplexer struct {
	mu sync.Mutex
	// calls has the calls that take further streams, by stored resource.
	calls map[string][]*multiplexedCall
	// unsupportedUntil is set after a replica of an older release has rejected a call.
	unsupportedUntil time.Time
}

// unsupportedTimeout is how long a replica of an older release keeps broadcasts from calls of Watches.
const unsupportedTimeout = time.Minute

// supported reports whether the replicas are known to serve Watches, or may.
func (m *multiplexer) supported() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().After(m.unsupportedUntil)
}

// open opens a stream of a stored resource. onReassign is called in a new goroutine when the stream's replica no longer
// serves the resource. ctx ends the stream.
func (m *multiplexer) open(ctx context.Context, client MultiplexedWatcher, storageResource string,
	r *watchfanoutv1.WatchRequest, onReassign func()) (*multiplexedStream, error) {
	c, err := m.callFor(client, storageResource)
	if err != nil {
		return nil, err
	}
	return c.open(ctx, r, onReassign), nil
}

// callFor returns the call with the fewest streams, or a new call.
func (m *multiplexer) callFor(client MultiplexedWatcher, storageResource string) (*multiplexedCall, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var c *multiplexedCall
	for _, other := range m.calls[storageResource] {
		if c == nil || other.len() < c.len() {
			c = other
		}
	}
	if c != nil && (c.len() == 0 || len(m.calls[storageResource]) == callsPerResource) {
		return c, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	c = &multiplexedCall{
		multiplexer:     m,
		storageResource: storageResource,
		cancel:          cancel,
		streams:         map[uint64]*multiplexedStream{},
	}
	c.space.L = &c.mu
	var err error
	c.stream, err = client.Watches(rpc.WithReassignment(ctx, storageResource, c.reassigned), grpc.WaitForReady(false))
	if err != nil {
		cancel()
		return nil, m.callError(err)
	}
	if m.calls == nil {
		m.calls = map[string][]*multiplexedCall{}
	}
	m.calls[storageResource] = append(m.calls[storageResource], c)
	go c.receive()
	return c, nil
}

// callError returns the error of the streams of a call that has ended. The caller holds the lock.
func (m *multiplexer) callError(err error) error {
	switch {
	case status.Code(err) == codes.Unimplemented:
		m.unsupportedUntil = time.Now().Add(unsupportedTimeout)
	case !errors.Is(err, io.EOF):
		return err
	}
	return status.Error(codes.Unavailable, "the replica has ended the call")
}

// retire lets the call take no further stream. It ends with its last stream.
func (m *multiplexer) retire(c *multiplexedCall) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.calls[c.storageResource]
	if i := slices.Index(all, c); i >= 0 {
		if m.calls[c.storageResource] = slices.Delete(all, i, i+1); len(all) == 1 {
			delete(m.calls, c.storageResource)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retired = true
	c.cancelIfUnused()
}

// multiplexedCall is a call of Watches. Lock order: multiplexer.mu, then multiplexedCall.mu.
type multiplexedCall struct {
	multiplexer     *multiplexer
	storageResource string
	stream          grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]
	cancel          context.CancelFunc

	sending sync.Mutex // serializes stream's Send

	mu      sync.Mutex
	streams map[uint64]*multiplexedStream
	lastID  uint64
	// space is signaled when a full queue has space, or its stream has ended.
	space   sync.Cond
	retired bool
	err     error // the call's end
}

func (c *multiplexedCall) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.streams)
}

// cancelIfUnused ends a retired call without streams. The lock is held.
func (c *multiplexedCall) cancelIfUnused() {
	if c.retired && len(c.streams) == 0 {
		c.cancel()
	}
}

func (c *multiplexedCall) open(
	ctx context.Context, r *watchfanoutv1.WatchRequest, onReassign func()) *multiplexedStream {
	c.mu.Lock()
	c.lastID++
	s := &multiplexedStream{call: c, id: c.lastID, onReassign: onReassign}
	if s.err = c.err; s.err == nil {
		c.streams[s.id] = s
	}
	c.mu.Unlock()
	c.send(&watchfanoutv1.WatchesRequest{WatchId: s.id, Watch: r})
	context.AfterFunc(ctx, func() {
		if s.end(status.FromContextError(ctx.Err()).Err()) {
			c.send(&watchfanoutv1.WatchesRequest{WatchId: s.id})
		}
	})
	return s
}

// send sends a request. receive returns the reason of a failure.
func (c *multiplexedCall) send(r *watchfanoutv1.WatchesRequest) {
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.stream.Send(r)
}

// reassigned reports to all streams that the replica no longer serves the resource.
func (c *multiplexedCall) reassigned() {
	c.multiplexer.retire(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		go s.onReassign()
	}
}

// receive distributes the replica's frames until the call ends.
func (c *multiplexedCall) receive() {
	defer c.cancel()
	err := c.distribute()
	c.multiplexer.mu.Lock()
	err = c.multiplexer.callError(err)
	c.multiplexer.mu.Unlock()
	c.multiplexer.retire(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	for _, s := range c.streams {
		s.endLocked(err)
	}
}

func (c *multiplexedCall) distribute() (err error) {
	defer recovery.ToError("a call of Watches", &err)
	for {
		m, err := c.stream.Recv()
		if err != nil {
			return err
		}
		end := endOf(m)
		if status.Code(end) == codes.Unavailable { // the replica drains, or its cache is stale
			c.multiplexer.retire(c)
		}
		c.deliver(m, end)
	}
}

// deliver gives a stream a frame or its end, unless it has ended.
func (c *multiplexedCall) deliver(m *watchfanoutv1.WatchFrame, end error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[m.WatchId]
	switch {
	case s == nil:
	case end != nil:
		s.endLocked(end)
	default:
		s.push(m)
	}
}

// endOf returns the error with which a frame ends its stream, or nil. A replica's frames are not trusted: a malformed
// frame ends its stream.
func endOf(m *watchfanoutv1.WatchFrame) error {
	if s := m.Status; s != nil {
		p := &spb.Status{Code: s.Code, Message: s.Message, Details: s.Details}
		if err := status.ErrorProto(p); err != nil {
			return err
		}
		return io.EOF
	}
	if !core.ValidBoundaries(m) {
		return errMalformed
	}
	return nil
}

// multiplexedStream is a broadcast's stream in a call. The call's lock guards it.
type multiplexedStream struct {
	call       *multiplexedCall
	id         uint64
	onReassign func()

	queue []*watchfanoutv1.WatchFrame
	err   error // the end, after the frames of queue
	// ready is called once, in a new goroutine, when there is a frame or the end (park).
	ready func()
	// changed wakes Recv.
	changed watchable.Signal
}

// Context implements sharedStream.
func (s *multiplexedStream) Context() context.Context { return s.call.stream.Context() }

// push queues a frame, and waits while the queue is full. The lock is held.
func (s *multiplexedStream) push(m *watchfanoutv1.WatchFrame) {
	for len(s.queue) >= streamFrames && s.err == nil {
		s.call.space.Wait()
	}
	if s.err == nil {
		s.queue = append(s.queue, m)
		s.notify()
	}
}

// end ends the stream. It returns false if the stream has ended before.
func (s *multiplexedStream) end(err error) bool {
	s.call.mu.Lock()
	defer s.call.mu.Unlock()
	return s.endLocked(err)
}

func (s *multiplexedStream) endLocked(err error) bool {
	if s.err != nil {
		return false
	}
	s.err = err
	delete(s.call.streams, s.id)
	s.call.cancelIfUnused()
	s.call.space.Broadcast()
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
			if s.queue = s.queue[1:]; len(s.queue) == 0 {
				s.queue = nil
			}
			s.call.space.Broadcast()
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
