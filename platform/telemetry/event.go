package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const eventTracer = "watershed.dev/events"

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
	ctx, span := current.events.Tracer(eventTracer).Start(ctx, "publish "+resource, options...)
	return span, TraceOf(ctx)
}

// EventSpan is a span of an event's way, from since until now; nothing where the event is not traced.
func EventSpan(traced, name string, since time.Time, attributes ...attribute.KeyValue) {
	if traced == "" {
		return
	}
	_, span := current.events.Tracer(eventTracer).
		Start(WithTrace(context.Background(), traced), name, trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithTimestamp(since), trace.WithAttributes(attributes...))
	span.End()
}
