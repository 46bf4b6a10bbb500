package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// unary is what every call that is not a stream passes, between processes and within one: its caller is checked, its
// duration counted, a panic becomes an error and an API error a status.
func unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (resp any, err error) {
	defer observe(info.FullMethod, time.Now(), &err)
	defer recovered(info.FullMethod, &err)
	if err := allowed(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	resp, err = h(ctx, req)
	return resp, ToStatus(err)
}

// stream is unary for streams.
func stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) (err error) {
	defer observe(info.FullMethod, time.Now(), &err)
	defer recovered(info.FullMethod, &err)
	if err := allowed(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return ToStatus(h(srv, ss))
}

// endByDrain ends the streams named in EndedByDrain with ErrDraining when the server drains.
func (s *Server) endByDrain(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	if !slices.Contains(EndedByDrain, info.FullMethod) {
		return h(srv, ss)
	}
	ctx, cancel := context.WithCancelCause(ss.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.draining, func() { cancel(ErrDraining) })()
	err := h(srv, &streamWithContext{ss, ctx})
	if errors.Is(context.Cause(ctx), ErrDraining) {
		return ErrDraining
	}
	return err
}

// streamWithContext is a stream whose handler sees another context.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

// Context is the handler's.
func (s *streamWithContext) Context() context.Context { return s.ctx }

func observe(method string, since time.Time, err *error) {
	handled.WithLabelValues(method, status.Code(*err).String()).Observe(time.Since(since).Seconds())
}

func recovered(name string, err *error) {
	if r := recover(); r != nil {
		slog.Error("A handler panicked", "method", name, "panic", r, "stack", string(debug.Stack()))
		*err = status.Error(codes.Internal,
			fmt.Sprintf("panic in %s: %v", name[strings.LastIndexByte(name, '/')+1:], r))
	}
}

// allowed says whether the caller may call the method. Health is anybody's who has a certificate at all.
func allowed(ctx context.Context, method string) error {
	if strings.HasPrefix(method, "/grpc.health.") {
		return nil
	}
	name, err := caller(ctx)
	if err != nil {
		return err
	}
	if !slices.Contains(Callers[method], name) {
		return status.Errorf(codes.PermissionDenied, "service %q may not call %s", name, method)
	}
	return nil
}

// caller is the service that calls: by its certificate or, within the process, by its connection.
func caller(ctx context.Context) (string, error) {
	if name, ok := ctx.Value(callerKey{}).(string); ok {
		return name, nil
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return "", status.Error(codes.Unauthenticated, "no client certificate")
	}
	return info.State.PeerCertificates[0].Subject.CommonName, nil
}

type callerKey struct{}

// asCaller is a context in which a service of this process calls.
func asCaller(ctx context.Context, service string) context.Context {
	return context.WithValue(ctx, callerKey{}, service)
}
