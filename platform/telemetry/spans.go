package telemetry

import (
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// smallSpans cuts the names, the attributes and the events' attributes of spans at maxValueBytes, because clients
// choose paths and other values. Thousands of spans may wait for the collector. The SDK's own limit of attributes
// would keep the whole value in memory, because its result shares the memory of the value.
//
// A copy is tracetest's stub, because the SDK has no other constructor of a span that has ended. A type of its own here
// would repeat the 16 fields of a span.
type smallSpans struct{ sdktrace.SpanProcessor }

// OnEnd implements sdktrace.SpanProcessor.
func (p smallSpans) OnEnd(s sdktrace.ReadOnlySpan) {
	p.SpanProcessor.OnEnd(small(s))
}

// small returns s, or a copy if s has a long value.
func small(s sdktrace.ReadOnlySpan) sdktrace.ReadOnlySpan {
	long := len(s.Name()) > maxValueBytes || hasLong(s.Attributes())
	for _, e := range s.Events() {
		long = long || hasLong(e.Attributes)
	}
	if !long {
		return s
	}
	c := tracetest.SpanStubFromReadOnlySpan(s)
	if len(c.Name) > maxValueBytes {
		c.Name = truncate(c.Name, maxValueBytes)
	}
	c.Attributes = shortened(c.Attributes)
	events := make([]sdktrace.Event, len(c.Events))
	for i, e := range c.Events {
		e.Attributes = shortened(e.Attributes)
		events[i] = e
	}
	c.Events = events
	return c.Snapshot()
}

func hasLong(all []attribute.KeyValue) bool {
	for _, a := range all {
		switch a.Value.Type() {
		case attribute.STRING:
			if len(a.Value.AsString()) > maxValueBytes {
				return true
			}
		case attribute.STRINGSLICE:
			for _, s := range a.Value.AsStringSlice() {
				if len(s) > maxValueBytes {
					return true
				}
			}
		}
	}
	return false
}

// shortened returns a copy of attributes without long values.
func shortened(all []attribute.KeyValue) []attribute.KeyValue {
	out := make([]attribute.KeyValue, len(all))
	for i, a := range all {
		switch a.Value.Type() {
		case attribute.STRING:
			if s := a.Value.AsString(); len(s) > maxValueBytes {
				a = a.Key.String(truncate(s, maxValueBytes))
			}
		case attribute.STRINGSLICE:
			values := a.Value.AsStringSlice()
			for i, s := range values {
				if len(s) > maxValueBytes {
					values[i] = truncate(s, maxValueBytes)
				}
			}
			a = a.Key.StringSlice(values)
		}
		out[i] = a
	}
	return out
}
