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
	// idleCallTimeout is how long a call outlives its last stream.
	idleCallTimeout = time.Second
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
}

type callKey struct{ storageResource, owner string }

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

// retireIfUnused retires a call without streams.
func (c *multiplexedCall) retireIfUnused() {
	if c.len() == 0 {
		c.multiplexer.retire(c)
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
