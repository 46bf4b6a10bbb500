package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const eventTracer = "watershed.dev/events"

// StartEventSpan starts the span of the publication of an etcd event. Its trace is the trace of the write (parent). If
// the write is not traced, the event may start its own trace. The second result is the traceparent to publish with the
// event, empty if the event is not traced. End the span when the event has been published.
func StartEventSpan(
	ctx context.Context,
	parent, resource string,
	revision int64,
	since time.Time,
) (trace.Span, string) {
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindProducer), trace.WithTimestamp(since),
		trace.WithAttributes(attribute.String("resource", resource), attribute.Int64("revision", revision))}
	if parent == "" {
		options = append(options, trace.WithNewRoot())
	} else {
		ctx = WithTraceparent(ctx, parent)
	}
	ctx, span := current.events.Tracer(eventTracer).Start(ctx, "publish "+resource, options...)
	return span, Traceparent(ctx)
}

// RecordEventSpan records a span of the delivery of an event, from since until now. It does nothing if the event is
// not traced.
func RecordEventSpan(traceparent, name string, since time.Time, attributes ...attribute.KeyValue) {
	if traceparent == "" {
		return
	}
	_, span := current.events.Tracer(eventTracer).
		Start(WithTraceparent(context.Background(), traceparent), name, trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithTimestamp(since), trace.WithAttributes(attributes...))
	span.End()
}
