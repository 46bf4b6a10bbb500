package rpc

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// InProcess connects clients to services in the same process: no sockets and no encoding. Messages are shared, not
// copied, so a message must not be changed once it has been sent; that holds for gRPC's own transport as well.
//
// It is a grpc.ServiceRegistrar and a grpc.ClientConnInterface. Register everything before the first call.
type InProcess struct {
	methods map[string]method
}

type method struct {
	impl   any
	unary  *grpc.MethodDesc
	stream *grpc.StreamDesc
}

// streamBuffer is how many messages a sender may be ahead of its receiver.
const streamBuffer = 32

// NewInProcess returns an empty transport.
func NewInProcess() *InProcess { return &InProcess{methods: map[string]method{}} }

// RegisterService implements grpc.ServiceRegistrar.
func (p *InProcess) RegisterService(d *grpc.ServiceDesc, impl any) {
	for i := range d.Methods {
		p.methods["/"+d.ServiceName+"/"+d.Methods[i].MethodName] = method{impl: impl, unary: &d.Methods[i]}
	}
	for i := range d.Streams {
		p.methods["/"+d.ServiceName+"/"+d.Streams[i].StreamName] = method{impl: impl, stream: &d.Streams[i]}
	}
}

// Invoke implements grpc.ClientConnInterface.
func (p *InProcess) Invoke(ctx context.Context, name string, args, reply any, _ ...grpc.CallOption) (err error) {
	m, ok := p.methods[name]
	if !ok || m.unary == nil {
		return status.Error(codes.Unimplemented, "unknown method "+name)
	}
	defer recovered(name, &err)
	out, err := m.unary.Handler(m.impl, serverContext(ctx), func(in any) error { share(in, args); return nil }, nil)
	if err != nil {
		return ToStatus(err)
	}
	share(reply, out)
	return nil
}

// NewStream implements grpc.ClientConnInterface.
func (p *InProcess) NewStream(ctx context.Context, _ *grpc.StreamDesc, name string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	m, ok := p.methods[name]
	if !ok || m.stream == nil {
		return nil, status.Error(codes.Unimplemented, "unknown stream "+name)
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &pipe{ctx: ctx, up: make(chan any, streamBuffer), down: make(chan any, streamBuffer), done: make(chan struct{})}
	go func() {
		defer cancel()
		defer close(s.done)
		defer recovered(name, &s.err)
		s.err = ToStatus(m.stream.Handler(m.impl, &serverPipe{s, serverContext(ctx)}))
	}()
	return &clientPipe{pipe: s}, nil
}

func recovered(name string, err *error) {
	if r := recover(); r != nil {
		slog.Error("A handler panicked", "method", name, "panic", r, "stack", string(debug.Stack()))
		*err = status.Error(codes.Internal, fmt.Sprintf("panic in %s: %v", name[strings.LastIndexByte(name, '/')+1:], r))
	}
}

func serverContext(ctx context.Context) context.Context {
	if md, ok := metadata.FromOutgoingContext(ctx); ok {
		ctx = metadata.NewIncomingContext(ctx, md)
	}
	return metadata.NewOutgoingContext(ctx, nil)
}

// share makes dst the same message as src without copying what src refers to.
func share(dst, src any) {
	d := dst.(proto.Message).ProtoReflect()
	src.(proto.Message).ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		d.Set(f, v)
		return true
	})
}

// pipe is one stream. err may be read once done is closed.
type pipe struct {
	ctx      context.Context
	up, down chan any
	upClosed sync.Once
	done     chan struct{}
	err      error
}

type clientPipe struct{ *pipe }

func (c *clientPipe) Header() (metadata.MD, error) { return nil, nil }
func (c *clientPipe) Trailer() metadata.MD         { return nil }
func (c *clientPipe) Context() context.Context     { return c.ctx }

func (c *clientPipe) CloseSend() error {
	c.upClosed.Do(func() { close(c.up) })
	return nil
}

func (c *clientPipe) SendMsg(m any) error {
	select {
	case c.up <- m:
		return nil
	case <-c.done:
		return io.EOF // as gRPC: RecvMsg has the reason
	case <-c.ctx.Done():
		return status.FromContextError(c.ctx.Err()).Err()
	}
}

func (c *clientPipe) RecvMsg(m any) error {
	select {
	case v := <-c.down:
		share(m, v)
		return nil
	default:
	}
	select {
	case v := <-c.down:
		share(m, v)
		return nil
	case <-c.done:
		select { // what was sent before the end comes before the end
		case v := <-c.down:
			share(m, v)
			return nil
		default:
		}
		if c.err == nil {
			return io.EOF
		}
		return c.err
	}
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
		share(m, v)
		return nil
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}
