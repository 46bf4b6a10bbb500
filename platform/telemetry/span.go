package telemetry

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

const (
	requestTracer = "watershed.dev/requests"
	// traceparentHeader is W3C trace context's header.
	traceparentHeader = "traceparent"
)

// StartSpan begins the span of a part of what is done for a request that is traced. For any other it is nothing, at the cost
// of a look. End it.
func StartSpan(ctx context.Context, name string) (context.Context, trace.Span) {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ctx, noop.Span{}
	}
	return otel.Tracer(requestTracer).Start(ctx, name)
}

// AddSpanEvent adds to the span of a request that is traced that something has come to pass, and with err why not.
func AddSpanEvent(ctx context.Context, name string, err error) {
	span := trace.SpanFromContext(ctx)
	switch {
	case !span.IsRecording():
	case err != nil:
		span.AddEvent(name, trace.WithAttributes(attribute.String("err", err.Error())))
	default:
		span.AddEvent(name)
	}
}

// Traceparent is the span of a context as W3C trace context writes it, and empty where it is not traced.
func Traceparent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparentHeader]
}

// WithTraceparent is a context within the span that Traceparent wrote; ctx where that is empty.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparentHeader: traceparent})
}
