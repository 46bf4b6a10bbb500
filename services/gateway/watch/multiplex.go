package watch

import (
	"context"
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
// Secrets. So the broadcasts of an owner share calls of Watches, and an idle broadcast has no goroutine. Owners share
// no call, because the large events of a tenant would delay the events of another.
//
//	replica ══ call of Watches ══► goroutine of receive ──► multiplexedStream's queue ──► goroutine of the broadcast
//
// A call never waits for a broadcast. A broadcast whose queue is full leaves for a call of Watch (errOverflow).

const (
	// callsPerOwner is the number of calls for an owner's broadcasts of a stored resource, because two replicas serve
	// a resource. The second begins when the first has streamsOfFirst streams.
	callsPerOwner  = 2
	streamsOfFirst = 32
	// streamFrames and streamBytes bound the frames of a stream's queue.
	streamFrames = 64
	streamBytes  = 512 << 10
	// idleCallTimeout is how long a call outlives its last stream.
	idleCallTimeout = time.Second
	// unsupportedTimeout is how long a replica of an older release keeps broadcasts from calls of Watches.
	unsupportedTimeout = time.Minute
)

// multiplexedWatcher is a Watcher that carries many watches in a call.
type multiplexedWatcher interface {
	Watches(context.Context, ...grpc.CallOption) (
		grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame], error)
}

// multiplexer has the calls for the broadcasts of a hub. Its zero value is ready to use.
type multiplexer struct {
	mu sync.Mutex
	// calls has the calls that take further streams.
	calls map[callKey][]*multiplexedCall
	// unsupportedUntil is set after a replica of an older release has rejected a call.
	unsupportedUntil time.Time
}

type callKey struct{ storageResource, owner string }

// supported reports whether the replicas are known to serve Watches, or may.
func (m *multiplexer) supported() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().After(m.unsupportedUntil)
}

// open opens a stream of a stored resource. onReassign is called in a new goroutine when another replica should carry
// the stream (rpc.WithReassignment). ctx ends the stream. open does not wait for the replica.
func (m *multiplexer) open(ctx context.Context, client multiplexedWatcher, storageResource string,
	r *watchfanoutv1.WatchRequest, onReassign func()) *multiplexedStream {
	key := callKey{storageResource, r.Owner}
	for {
		if s := m.callFor(client, key).open(ctx, r, onReassign); s != nil {
			return s
		}
	}
}

// callFor returns the call with the fewest streams, or a new call.
func (m *multiplexer) callFor(client multiplexedWatcher, key callKey) *multiplexedCall {
	m.mu.Lock()
	defer m.mu.Unlock()
	var c *multiplexedCall
	for _, other := range m.calls[key] {
		if c == nil || other.len() < c.len() {
			c = other
		}
	}
	if c != nil && (c.len() < streamsOfFirst || len(m.calls[key]) == callsPerOwner) {
		return c
	}
	c = &multiplexedCall{multiplexer: m, client: client, key: key, streams: map[uint64]*multiplexedStream{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if m.calls == nil {
		m.calls = map[callKey][]*multiplexedCall{}
	}
	m.calls[key] = append(m.calls[key], c)
	return c
}

// retire lets the call take no further stream. It ends with its last stream.
func (m *multiplexer) retire(c *multiplexedCall) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.calls[c.key]
	if i := slices.Index(all, c); i >= 0 {
		if m.calls[c.key] = slices.Delete(all, i, i+1); len(all) == 1 {
			delete(m.calls, c.key)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retired = true
	c.cancelIfUnused()
}

// multiplexedCall is a call of Watches. Lock order: multiplexer.mu, then multiplexedCall.mu.
type multiplexedCall struct {
	multiplexer *multiplexer
	client      multiplexedWatcher
	key         callKey
	ctx         context.Context
	cancel      context.CancelFunc

	mu      sync.Mutex
	stream  grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame] // nil until it is open
	streams map[uint64]*multiplexedStream
	lastID  uint64
	// requests waits for the goroutine of send, which runs while sending is true.
	requests []*watchfanoutv1.WatchesRequest
	sending  bool
	retired  bool
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

// open opens a stream. It returns nil if the call is retired.
func (c *multiplexedCall) open(
	ctx context.Context, r *watchfanoutv1.WatchRequest, onReassign func()) *multiplexedStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.retired {
		return nil
	}
	c.lastID++
	s := &multiplexedStream{call: c, id: c.lastID, onReassign: onReassign}
	c.streams[s.id] = s
	c.request(&watchfanoutv1.WatchesRequest{WatchId: s.id, Watch: r})
	context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		s.leave(status.FromContextError(ctx.Err()).Err())
	})
	return s
}

// request sends a request. The lock is held.
func (c *multiplexedCall) request(r *watchfanoutv1.WatchesRequest) {
	c.requests = append(c.requests, r)
	if !c.sending {
		c.sending = true
		go c.send()
	}
}

// send begins the call, if it has not begun, and sends the requests. receive returns the reason of a failure.
func (c *multiplexedCall) send() {
	stream := c.begin()
	for {
		c.mu.Lock()
		requests := c.requests
		c.requests, c.sending = nil, len(requests) > 0
		c.mu.Unlock()
		if len(requests) == 0 {
			return
		}
		for _, r := range requests {
			if stream != nil {
				_ = stream.Send(r)
			}
		}
	}
}

// begin returns the stream of the call, or nil if it cannot be opened.
func (c *multiplexedCall) begin() grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame] {
	c.mu.Lock()
	stream := c.stream
	c.mu.Unlock()
	if stream != nil {
		return stream
	}
	ctx := rpc.WithReassignment(c.ctx, c.key.storageResource, c.reassigned)
	stream, err := c.client.Watches(ctx, grpc.WaitForReady(false))
	if err != nil {
		c.ended(err)
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stream = stream
	go func() { c.ended(c.receive(stream)) }()
	return stream
}

// reassigned retires the call, and lets each stream move (rpc.WithReassignment).
func (c *multiplexedCall) reassigned() {
	c.multiplexer.retire(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		go s.onReassign()
	}
}

// receive distributes the replica's frames until the call ends.
func (c *multiplexedCall) receive(
	stream grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]) (err error) {
	defer recovery.ToError("a call of Watches", &err)
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.Status.GetUnready() {
			c.multiplexer.retire(c)
		}
		c.deliver(m)
	}
}

// deliver gives a stream a frame or its end, unless it has ended.
func (c *multiplexedCall) deliver(m *watchfanoutv1.WatchFrame) {
	end := endOf(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[m.WatchId]
	switch {
	case s == nil:
	case m.Status != nil:
		s.end(end)
	case end != nil:
		s.leave(end)
	default:
		s.push(m)
	}
}

// ended ends the streams of a call that has ended. They resume in another call.
func (c *multiplexedCall) ended(err error) {
	if status.Code(err) == codes.Unimplemented {
		c.multiplexer.mu.Lock()
		c.multiplexer.unsupportedUntil = time.Now().Add(unsupportedTimeout)
		c.multiplexer.mu.Unlock()
	}
	c.multiplexer.retire(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		s.end(status.Errorf(codes.Unavailable, "the call has ended: %v", err))
	}
	c.cancel()
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

// retireIfUnused retires a call without streams.
func (c *multiplexedCall) retireIfUnused() {
	if c.len() == 0 {
		c.multiplexer.retire(c)
	}
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
