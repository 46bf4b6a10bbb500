package telemetry

import (
	"fmt"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// Spans keep no long value of a client. Short values and all other data of a span stay.
func TestSpansAreSmall(t *testing.T) {
	ended := tracetest.NewSpanRecorder()
	p := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(smallSpans{ended}))
	long := strings.Repeat("x", 1<<20)
	for _, name := range []string{"GET", long} {
		for _, value := range []string{"/a", long} {
			_, span := p.Tracer("t").Start(t.Context(), name, trace.WithSpanKind(trace.SpanKindServer))
			span.SetAttributes(attribute.String("url.path", value), attribute.Int("status", 200),
				attribute.StringSlice("all", []string{value, "b"}))
			span.AddEvent("failed", trace.WithAttributes(attribute.String("err", value)))
			span.End()
		}
	}
	for i, s := range ended.Ended() {
		text := fmt.Sprint(s.Name(), s.Attributes(), s.Events())
		if len(text) > 4*(maxValueBytes+200) {
			t.Errorf("span %d has %d bytes", i, len(text))
		}
		if len(s.Attributes()) != 3 || len(s.Events()) != 1 || s.SpanKind() != trace.SpanKindServer ||
			!s.SpanContext().IsSampled() || s.EndTime().IsZero() || s.InstrumentationScope().Name != "t" {
			t.Errorf("span %d has lost something: %+v", i, s)
		}
		if i == 0 && (s.Name() != "GET" || s.Attributes()[0].Value.AsString() != "/a") {
			t.Errorf("%s %v", s.Name(), s.Attributes())
		}
	}
	if n := len(ended.Ended()); n != 4 {
		t.Errorf("%d spans", n)
	}
}
