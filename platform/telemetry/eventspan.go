package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const eventTracer = "watershed.dev/events"

// StartEventSpan starts the span of one event of etcd, in the trace of the write that it is of (cause) or, where that is
// not traced, perhaps in one of its own. It answers what of it travels with the event: empty where it is not traced.
// End the span when the event is on its way.
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

// RecordEventSpan is a span of an event's way, from since until now; nothing where the event is not traced.
func RecordEventSpan(traceparent, name string, since time.Time, attributes ...attribute.KeyValue) {
	if traceparent == "" {
		return
	}
	_, span := current.events.Tracer(eventTracer).
		Start(WithTraceparent(context.Background(), traceparent), name, trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithTimestamp(since), trace.WithAttributes(attributes...))
	span.End()
}
