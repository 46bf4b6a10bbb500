package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const (
	tracerName  = "watershed.dev/events"
	traceparent = "traceparent"
)

// BeginEvent starts the span of one event of etcd, in the trace of the write that it is of (cause) or, where that is
// not traced, perhaps in one of its own. It answers what of it travels with the event: empty where it is not traced.
// End the span when the event is on its way.
func BeginEvent(ctx context.Context, cause, resource string, revision int64, since time.Time) (trace.Span, string) {
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindProducer), trace.WithTimestamp(since),
		trace.WithAttributes(attribute.String("resource", resource), attribute.Int64("revision", revision))}
	if cause == "" {
		options = append(options, trace.WithNewRoot())
	} else {
		ctx = WithTrace(ctx, cause)
	}
	ctx, span := current.events.Tracer(tracerName).Start(ctx, "publish "+resource, options...)
	return span, TraceOf(ctx)
}

// StartEventSpan starts a span of an event's trace somewhere on its way; a no-op where the event is not traced.
func StartEventSpan(traced, name string, since time.Time, attributes ...attribute.KeyValue) trace.Span {
	if traced == "" {
		return trace.SpanFromContext(context.Background())
	}
	_, span := current.events.Tracer(tracerName).
		Start(WithTrace(context.Background(), traced), name, trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithTimestamp(since), trace.WithAttributes(attributes...))
	return span
}
