package telemetry

import (
	"context"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// sampled returns a context with a span that is recorded.
func sampled(tb testing.TB) context.Context {
	p := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()))
	tb.Cleanup(func() { _ = p.Shutdown(context.Background()) })
	ctx, _ := p.Tracer("test").Start(context.Background(), "request")
	return ctx
}

// A traceparent crosses processes as text. An untraced context has none.
func TestATraceCrossesAsText(t *testing.T) {
	ctx := sampled(t)
	traced := Traceparent(ctx)
	if got := trace.SpanContextFromContext(WithTraceparent(context.Background(), traced)); got.TraceID() !=
		trace.SpanContextFromContext(ctx).TraceID() || !got.IsSampled() || !got.IsRemote() {
		t.Errorf("%q is read as %v", traced, got)
	}
	if got := Traceparent(t.Context()); got != "" {
		t.Errorf("a context without a span is %q", got)
	}
	if got := WithTraceparent(t.Context(), ""); got != t.Context() {
		t.Error("an empty traceparent changes the context")
	}
	for _, bad := range []string{"x", "00-0-0-01", traced[:20]} {
		if trace.SpanContextFromContext(WithTraceparent(t.Context(), bad)).IsValid() {
			t.Errorf("%q is a span", bad)
		}
	}
	RecordEventSpan("", "nothing", time.Now())
	RecordEventSpan("rubbish", "nothing", time.Now())
}

// BenchmarkStartSpan measures a step of an untraced and of a traced request.
func BenchmarkStartSpan(b *testing.B) {
	for name, ctx := range map[string]context.Context{"untraced": context.Background(), "traced": sampled(b)} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				ctx, span := StartSpan(ctx, "step")
				AddSpanEvent(ctx, "note", nil)
				span.End()
			}
		})
	}
}
