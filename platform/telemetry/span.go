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
	// traceparentHeader is the header of W3C Trace Context.
	traceparentHeader = "traceparent"
)

// StartSpan starts a span of a step of a traced request. End it. For an untraced request it only checks the context.
func StartSpan(ctx context.Context, name string) (context.Context, trace.Span) {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ctx, noop.Span{}
	}
	return otel.Tracer(requestTracer).Start(ctx, name)
}

// AddSpanEvent adds an event to the span of a traced request, and a step if the request has steps. err is the error of
// the event, or nil.
func AddSpanEvent(ctx context.Context, name string, err error) {
	AddStep(ctx, name)
	span := trace.SpanFromContext(ctx)
	switch {
	case !span.IsRecording():
	case err != nil:
		span.AddEvent(name, trace.WithAttributes(attribute.String("err", err.Error())))
	default:
		span.AddEvent(name)
	}
}

// Traceparent returns the span of ctx as a W3C traceparent, or "" if it is not traced.
func Traceparent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparentHeader]
}

// WithTraceparent returns ctx with the span of a traceparent, and ctx itself if the traceparent is empty.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparentHeader: traceparent})
}
