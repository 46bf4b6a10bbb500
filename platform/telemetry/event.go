package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const (
	tracerName  = "watershed.dev/events"
	traceparent = "traceparent"
)

// BeginEvent starts the trace of one event of etcd, and answers what of it travels with the event: empty where events
// are not traced. End the span when the event is in the log.
func BeginEvent(ctx context.Context, resource string, revision int64) (trace.Span, string) {
	ctx, span := current.events.Tracer(tracerName).Start(ctx, "publish "+resource, trace.WithNewRoot(),
		trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.String("resource", resource), attribute.Int64("revision", revision)))
	if !span.IsRecording() {
		return span, ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return span, carrier[traceparent]
}

// StartEventSpan starts a span of an event's trace somewhere on its way; a no-op where the event is not traced.
func StartEventSpan(traced, name string, since time.Time, attributes ...attribute.KeyValue) trace.Span {
	if traced == "" {
		return trace.SpanFromContext(context.Background())
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{traceparent: traced})
	_, span := current.events.Tracer(tracerName).Start(ctx, name, trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithTimestamp(since), trace.WithAttributes(attributes...))
	return span
}
