package telemetry

import (
	"fmt"
	"log/slog"
	"strings"
	"unicode/utf8"
)

// Bounds of the parts of a log line, in bytes. Clients may choose paths, users and other values, and messages and
// errors may quote such a value.
const (
	maxValueBytes   = 256
	maxMessageBytes = 1 << 10
	maxStackBytes   = 16 << 10
)

// truncateAttr is a slog.HandlerOptions.ReplaceAttr that cuts values above their bound.
func truncateAttr(_ []string, a slog.Attr) slog.Attr {
	limit := maxValueBytes
	switch a.Key {
	case slog.MessageKey:
		limit = maxMessageBytes
		if strings.HasPrefix(a.Value.String(), "Trace[") { // the steps of a slow request (k8s.io/utils/trace)
			limit = maxStackBytes
		}
	case "err":
		limit = maxMessageBytes
	case "panic", "stack", "stacktrace":
		limit = maxStackBytes
	}
	switch a.Value.Kind() {
	case slog.KindString:
		if s := a.Value.String(); len(s) > limit {
			a.Value = slog.StringValue(truncate(s, limit))
		}
	case slog.KindAny:
		if s := fmt.Sprintf("%+v", a.Value.Any()); len(s) > limit {
			a.Value = slog.StringValue(truncate(s, limit))
		}
	}
	return a
}

// truncate returns the first n bytes of s, without a partial character, and the number of bytes that it omits.
func truncate(s string, n int) string {
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return fmt.Sprintf("%s… (%d bytes more)", strings.Clone(s[:n]), len(s)-n)
}
