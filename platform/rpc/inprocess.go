package rpc

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// InProcess connects clients to services in the same process, without sockets and without encoding. It shares messages
// and does not copy them. A sender must therefore not change a message that it has sent, as with gRPC's own transport.
// Calls pass the same interceptors as calls between processes: authorization, metrics, panics. MaxMessageBytes bounds
// requests, but not responses, unlike between processes.
//
// It is a grpc.ServiceRegistrar. A call of a service that is not registered yet fails with UNAVAILABLE.
type InProcess struct {
	mu      sync.RWMutex
	methods map[string]method
	// spans creates a span for each traced call; nil: no spans.
	spans stats.Handler
}

type method struct {
	impl   any
	unary  *grpc.MethodDesc
	stream *grpc.StreamDesc
}

const (
	// streamBuffer is the number of messages that a sender may be ahead of its receiver.
	streamBuffer = 32
	// streamBytes bounds the bytes of list chunks that a sender is ahead, unless a single chunk has more. A chunk has
	// some 256 KB, or a larger object.
	streamBytes = 4 << 20
)

// NewInProcess returns a transport without services. tracing enables spans.
func NewInProcess(tracing bool) *InProcess {
	p := &InProcess{methods: map[string]method{}}
	if tracing {
		p.spans = otelgrpc.NewServerHandler()
	}
	return p
}

// RegisterService implements grpc.ServiceRegistrar.
func (p *InProcess) RegisterService(d *grpc.ServiceDesc, impl any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range d.Methods {
		p.methods["/"+d.ServiceName+"/"+d.Methods[i].MethodName] = method{impl: impl, unary: &d.Methods[i]}
	}
	for i := range d.Streams {
		p.methods["/"+d.ServiceName+"/"+d.Streams[i].StreamName] = method{impl: impl, stream: &d.Streams[i]}
	}
}

// method returns a method of a registered service.
func (p *InProcess) method(name string) (method, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if m, ok := p.methods[name]; ok {
		return m, nil
	}
	if _, known := AllowedClients[name]; known {
		return method{}, status.Error(codes.Unavailable, "the service of "+name+" is starting")
	}
	return method{}, status.Error(codes.Unimplemented, "unknown method "+name)
}

// Client returns the connection on which a service calls other services.
func (p *InProcess) Client(service string) grpc.ClientConnInterface {
	return &inProcessClient{p, service}
}

// inProcessClient is a service's connection to the other services.
type inProcessClient struct {
	*InProcess
	service string
}

// Invoke implements grpc.ClientConnInterface.
func (c *inProcessClient) Invoke(ctx context.Context, name string, args, reply any, _ ...grpc.CallOption) (err error) {
	m, err := c.method(name)
	if err != nil {
		return err
	}
	if err := checkSize(args); err != nil {
		return err
	}
	ctx, end := c.begin(ctx, name)
	defer func() { end(err) }()
	out, err := m.unary.Handler(m.impl, ctx, func(in any) error { shallowCopy(in, args); return nil }, unaryInterceptor)
	if err != nil {
		return ToStatus(err)
	}
	shallowCopy(reply, out)
	return nil
}

// NewStream implements grpc.ClientConnInterface.
func (c *inProcessClient) NewStream(ctx context.Context, _ *grpc.StreamDesc, name string,
	_ ...grpc.CallOption) (grpc.ClientStream, error) {
	m, err := c.method(name)
	if err != nil {
		return nil, err
	}
	caller := ctx
	ctx, cancel := context.WithCancel(ctx)
	requests := 1
	if m.stream.ClientStreams {
		requests = streamBuffer
	}
	s := &pipe{
		ctx:   ctx,
		up:    make(chan any, requests),
		down:  make(chan any, streamBuffer),
		taken: make(chan struct{}, 1),
		done:  make(chan struct{}),
	}
	info := &grpc.StreamServerInfo{
		FullMethod:     name,
		IsClientStream: m.stream.ClientStreams,
		IsServerStream: m.stream.ServerStreams,
	}
	go func() {
		defer cancel()
		defer close(s.done)
		ctx, end := c.begin(ctx, name)
		s.err = ToStatus(streamInterceptor(m.impl, &serverPipe{s, ctx}, info, m.stream.Handler))
		end(s.err)
	}()
	return &clientPipe{s, caller}, nil
}

// begin returns the context of a call at the server, and a function to call when the call ends.
func (c *inProcessClient) begin(ctx context.Context, name string) (context.Context, func(error)) {
	ctx, cancel := serverContext(ctx)
	ctx = withClient(ctx, c.service)
	if c.spans == nil || !clientSampled(ctx) {
		return ctx, func(error) { cancel() }
	}
	began := time.Now()
	ctx = c.spans.TagRPC(ctx, &stats.RPCTagInfo{FullMethodName: name})
	c.spans.HandleRPC(ctx, &stats.Begin{BeginTime: began})
	return ctx, func(err error) {
		c.spans.HandleRPC(ctx, &stats.End{
			BeginTime: began,
			EndTime:   time.Now(),
			Error:     err,
		})
		cancel()
	}
}

// checkSize rejects a request that is too large for the wire. Responses are not rejected, because their operations
// have already happened.
func checkSize(m any) error {
	if n := proto.Size(m.(proto.Message)); n > MaxMessageBytes {
		return status.Errorf(codes.ResourceExhausted, "a message of %d bytes is larger than %d", n, MaxMessageBytes)
	}
	return nil
}

// serverContext returns the context of a call at the server, until cancel. It has the values of the caller's context
// that a wire carries (metadata, baggage, deadline), the caller's span, and no other value. A service must not find
// more values than in a process of its own.
func serverContext(caller context.Context) (ctx context.Context, cancel context.CancelFunc) {
	ctx, cancel = context.WithCancel(withoutValues{caller})
	if span := trace.SpanFromContext(caller); span.SpanContext().IsValid() {
		ctx = trace.ContextWithSpan(ctx, span)
	}
	if b := baggage.FromContext(caller); b.Len() > 0 {
		ctx = baggage.ContextWithBaggage(ctx, b)
	}
	if md, ok := metadata.FromOutgoingContext(caller); ok {
		ctx = metadata.NewIncomingContext(ctx, md)
	}
	return ctx, cancel
}

// withoutValues is a context that hides its values.
type withoutValues struct{ context.Context }

// Value implements context.Context.
func (withoutValues) Value(any) any { return nil }

// AfterFunc lets package context cancel a child of this context without a goroutine. Children of that child find it by
// themselves.
func (c withoutValues) AfterFunc(f func()) (stop func() bool) { return context.AfterFunc(c.Context, f) }

// shallowCopy sets dst to the message src. It does not copy the memory that src refers to.
func shallowCopy(dst, src any) {
	if c, ok := dst.(*Chunk); ok {
		c.setFrom(src.(*watchfanoutv1.ListChunk))
		return
	}
	if m, ok := src.(*TrackedFrame); ok {
		m.Done()
		src = m.WatchFrame
	}
	if m, ok := src.(*Held); ok {
		m.Release()
		src = m.Message
	}
	d := dst.(proto.Message).ProtoReflect()
	src.(proto.Message).ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		d.Set(f, v)
		return true
	})
}

// pipe is a stream. err may be read after done is closed.
type pipe struct {
	ctx      context.Context
	up, down chan any
	upClosed sync.Once
	// ahead has the bytes of the list chunks in down. taken has a token if the receiver has taken a list chunk since
	// the sender last waited.
	ahead atomic.Int64
	taken chan struct{}
	done  chan struct{}
	err   error
}

type clientPipe struct {
	*pipe
	// caller is the client's context. The context of pipe also ends with the handler.
	caller context.Context
}

func (c *clientPipe) Header() (metadata.MD, error) { return nil, nil }
func (c *clientPipe) Trailer() metadata.MD         { return nil }
func (c *clientPipe) Context() context.Context     { return c.ctx }

func (c *clientPipe) CloseSend() error {
	c.upClosed.Do(func() { close(c.up) })
	return nil
}

func (c *clientPipe) SendMsg(m any) error {
	if err := checkSize(m); err != nil {
		return err
	}
	select {
	case c.up <- m:
		return nil
	case <-c.done:
		return io.EOF // as in gRPC: RecvMsg returns the reason
	case <-c.ctx.Done():
		return status.FromContextError(c.ctx.Err()).Err()
	}
}

func (c *clientPipe) RecvMsg(m any) error {
	select {
	case v := <-c.down:
		c.take(m, v)
		return nil
	default:
	}
	select {
	case v := <-c.down:
		c.take(m, v)
		return nil
	case <-c.done:
		select { // messages come before the end
		case v := <-c.down:
			c.take(m, v)
			return nil
		default:
		}
		if c.err == nil {
			return io.EOF
		}
		return c.err
	case <-c.caller.Done(): // the handler may ignore it
		return status.FromContextError(c.caller.Err()).Err()
	}
}

// take copies a received message to m.
func (c *clientPipe) take(m, received any) {
	shallowCopy(m, received)
	if n := listBytes(received); n > 0 {
		c.ahead.Add(-n)
		select {
		case c.taken <- struct{}{}:
		default:
		}
	}
}

// listBytes returns the bytes of a list chunk, or 0 for another message.
func listBytes(m any) (n int64) {
	if chunk, ok := m.(*watchfanoutv1.ListChunk); ok {
		for _, piece := range chunk.Data {
			n += int64(len(piece))
		}
	}
	return n
}

type serverPipe struct {
	*pipe
	serverCtx context.Context
}

func (s *serverPipe) SetHeader(metadata.MD) error  { return nil }
func (s *serverPipe) SendHeader(metadata.MD) error { return nil }
func (s *serverPipe) SetTrailer(metadata.MD)       {}
func (s *serverPipe) Context() context.Context     { return s.serverCtx }

func (s *serverPipe) SendMsg(m any) error {
	if n := listBytes(m); n > 0 {
		for ahead := s.ahead.Load(); ahead > 0 && ahead+n > streamBytes; ahead = s.ahead.Load() {
			select {
			case <-s.taken:
			case <-s.ctx.Done():
				return status.FromContextError(s.ctx.Err()).Err()
			}
		}
		s.ahead.Add(n)
	}
	select {
	case s.down <- m:
		return nil
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}

func (s *serverPipe) RecvMsg(m any) error {
	select {
	case v, ok := <-s.up:
		if !ok {
			return io.EOF
		}
		shallowCopy(m, v)
		return nil
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}
