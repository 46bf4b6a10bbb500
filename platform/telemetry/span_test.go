package telemetry

import (
	"context"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// sampled is a context within a span that is recorded.
func sampled(tb testing.TB) context.Context {
	p := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()))
	tb.Cleanup(func() { _ = p.Shutdown(context.Background()) })
	ctx, _ := p.Tracer("test").Start(context.Background(), "request")
	return ctx
}

// A span's context crosses processes as text, and of what is not traced there is none.
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
		t.Error("no text makes another context")
	}
	for _, bad := range []string{"x", "00-0-0-01", traced[:20]} {
		if trace.SpanContextFromContext(WithTraceparent(t.Context(), bad)).IsValid() {
			t.Errorf("%q is a span", bad)
		}
	}
	RecordEventSpan("", "nothing", time.Now())
	RecordEventSpan("rubbish", "nothing", time.Now())
}

// BenchmarkStartSpan is what a step costs a request that is not traced, and one that is.
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
