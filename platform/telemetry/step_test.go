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
	traced := TraceOf(ctx)
	if got := trace.SpanContextFromContext(WithTrace(context.Background(), traced)); got.TraceID() !=
		trace.SpanContextFromContext(ctx).TraceID() || !got.IsSampled() || !got.IsRemote() {
		t.Errorf("%q is read as %v", traced, got)
	}
	if got := TraceOf(t.Context()); got != "" {
		t.Errorf("a context without a span is %q", got)
	}
	if got := WithTrace(t.Context(), ""); got != t.Context() {
		t.Error("no text makes another context")
	}
	for _, bad := range []string{"x", "00-0-0-01", traced[:20]} {
		if trace.SpanContextFromContext(WithTrace(t.Context(), bad)).IsValid() {
			t.Errorf("%q is a span", bad)
		}
	}
	EventSpan("", "nothing", time.Now())
	EventSpan("rubbish", "nothing", time.Now())
}

// BenchmarkStep is what a step costs a request that is not traced, and one that is.
func BenchmarkStep(b *testing.B) {
	for name, ctx := range map[string]context.Context{"untraced": context.Background(), "traced": sampled(b)} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				ctx, span := Step(ctx, "step")
				Note(ctx, "note", nil)
				span.End()
			}
		})
	}
}
