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

// sampledOnly makes spans of calls that are a part of a sampled trace, and costs the others one look.
type sampledOnly struct {
	stats.Handler
	sampled func(context.Context) bool
}

// TagRPC implements stats.Handler.
func (s *sampledOnly) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !s.sampled(ctx) {
		return context.WithValue(ctx, taggedKey{}, (*sampledOnly)(nil)) // also where it is a part of a call that is
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

// clientSampled says of a client's call whether its caller is traced.
func clientSampled(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsSampled() }

// serverSampled says of a server's call whether its client is traced; no client of ours says so but then.
func serverSampled(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return len(md["traceparent"]) > 0
}

// TracingDialOptions has a connection's calls be a part of the traces that they are made in; nothing where nothing is traced.
func TracingDialOptions() []grpc.DialOption {
	if !telemetry.TracingEnabled() {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(&sampledOnly{otelgrpc.NewClientHandler(), clientSampled})}
}

// tracingServerOptions is TracingDialOptions's other side.
func tracingServerOptions() []grpc.ServerOption {
	if !telemetry.TracingEnabled() {
		return nil
	}
	return []grpc.ServerOption{grpc.StatsHandler(&sampledOnly{otelgrpc.NewServerHandler(), serverSampled})}
}
