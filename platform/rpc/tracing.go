package rpc

import (
	"context"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"

	"watershed.dev/platform/telemetry"
)

// sampledOnly creates spans for calls in sampled traces. For other calls it only checks the context.
type sampledOnly struct {
	stats.Handler
	sampled func(context.Context) bool
}

// TagRPC implements stats.Handler.
func (s *sampledOnly) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !s.sampled(ctx) {
		return context.WithValue(ctx, taggedKey{}, (*sampledOnly)(nil)) // replaces an enclosing call's value
	}
	return context.WithValue(s.Handler.TagRPC(ctx, info), taggedKey{}, s)
}

// HandleRPC implements stats.Handler.
func (s *sampledOnly) HandleRPC(ctx context.Context, r stats.RPCStats) {
	if ctx.Value(taggedKey{}) == s {
		s.Handler.HandleRPC(ctx, r)
	}
}

type taggedKey struct{}

// clientSampled reports if the caller of an outgoing call is traced.
func clientSampled(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }

// serverSampled reports if the client of an incoming call is traced. Our clients send a traceparent only if they are.
func serverSampled(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return len(md["traceparent"]) > 0
}

// TracingDialOptions returns options that add a connection's calls to their callers' traces. It returns nil if tracing
// is off.
func TracingDialOptions() []grpc.DialOption {
	if !telemetry.TracingEnabled() {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(&sampledOnly{otelgrpc.NewClientHandler(), clientSampled})}
}

// tracingServerOptions returns the options of servers for the spans of TracingDialOptions.
func tracingServerOptions() []grpc.ServerOption {
	if !telemetry.TracingEnabled() {
		return nil
	}
	return []grpc.ServerOption{grpc.StatsHandler(&sampledOnly{otelgrpc.NewServerHandler(), serverSampled})}
}
