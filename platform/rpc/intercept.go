package rpc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/recovery"
)

var rpcDuration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
	Name:    "watershed_rpc_duration_seconds",
	Help:    "Duration in seconds of RPCs served, by method and code. Streams count to their end.",
	Buckets: prometheus.ExponentialBuckets(0.00025, 4, 9),
}, []string{"method", "code"})

// Metrics returns the collectors that every process has. A process with an xDS client also has XDS.Metrics.
func Metrics() []prometheus.Collector { return []prometheus.Collector{rpcDuration} }

// unaryInterceptor intercepts every unary call, between processes and in process. It authorizes the client, records
// the duration, and converts panics and API errors to statuses.
func unaryInterceptor(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	h grpc.UnaryHandler,
) (resp any, err error) {
	defer observe(info.FullMethod, time.Now(), &err)
	defer recoverPanic(info.FullMethod, &err)
	if err := authorize(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	ctx, steps := startServerSteps(ctx, info.FullMethod)
	defer steps.End()
	resp, err = h(ctx, req)
	return resp, ToStatus(err)
}

// streamInterceptor is unaryInterceptor for streams.
func streamInterceptor(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) (err error) {
	defer observe(info.FullMethod, time.Now(), &err)
	defer recoverPanic(info.FullMethod, &err)
	if err := authorize(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	if ctx, steps := startServerSteps(ss.Context(), info.FullMethod); steps != nil &&
		!slices.Contains(lasting, info.FullMethod) {
		defer steps.End()
		ss = &streamWithContext{ss, ctx}
	}
	return ToStatus(h(srv, ss))
}

// endOnDrain ends the streams named in EndOnDrain with ErrDraining when the server drains.
func (s *Server) endOnDrain(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	if !slices.Contains(EndOnDrain, info.FullMethod) {
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

// streamWithContext is a stream with another context.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

// Context returns the context of the handler.
func (s *streamWithContext) Context() context.Context { return s.ctx }

func observe(method string, since time.Time, err *error) {
	d := time.Since(since)
	rpcDuration.WithLabelValues(method, status.Code(*err).String()).Observe(d.Seconds())
	if !slices.Contains(lasting, method) {
		Traffic.Observe(d)
	}
}

func recoverPanic(name string, err *error) {
	if r := recover(); r != nil {
		recovery.Observe(name, r)
		*err = status.Error(codes.Internal,
			fmt.Sprintf("panic in %s: %v", name[strings.LastIndexByte(name, '/')+1:], r))
	}
}

// authorize returns an error if the client may not call the method. Every client with a certificate of the inner CA
// may call health checks.
func authorize(ctx context.Context, method string) error {
	if strings.HasPrefix(method, "/grpc.health.") {
		return nil
	}
	name, err := clientName(ctx)
	if err != nil {
		return err
	}
	if !slices.Contains(AllowedClients[method], name) {
		return status.Errorf(codes.PermissionDenied, "service %q may not call %s", name, method)
	}
	return nil
}

// clientName returns the name of the calling service: from its certificate or, in the same process, from its
// connection.
func clientName(ctx context.Context) (string, error) {
	if name, ok := ctx.Value(clientKey{}).(string); ok {
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

type clientKey struct{}

// withClient returns ctx with the name of the service in this process that calls.
func withClient(ctx context.Context, service string) context.Context {
	return context.WithValue(ctx, clientKey{}, service)
}
