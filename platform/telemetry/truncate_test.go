package telemetry

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

// A log line is bounded for any path, user or error of a client, and for every logging library.
func TestALogLineIsBounded(t *testing.T) {
	long := strings.Repeat("ä", 500_000)
	for _, format := range []string{"text", "json"} {
		before := slog.Default()
		var out bytes.Buffer
		o := Options{LogFormat: format}
		stop, err := o.Start(t.Context(), "test", &out)
		if err != nil {
			t.Fatal(err)
		}
		const value, message, stack = 256, 1 << 10, 16 << 10
		for i, line := range []struct {
			most int // the bounds of the line's long parts together
			log  func()
		}{
			{value + stack, func() { slog.Error("A request went on", "path", long, "panic", long) }},
			{message + message, func() { slog.Error(long, "error", errors.New(long)) }},
			{value, func() { slog.Error("any", "value", struct{ Path []string }{[]string{long, long}}) }},
			{value, func() { slog.Error("group", slog.Group("request", "path", long)) }},
			{value, func() { slog.With("path", long).Error("with") }},
			{message + value, func() { klog.ErrorS(errors.New(long), "Timeout or abort while handling", "URI", long) }},
			{message, func() { klog.Errorf("bad URI %q", long) }},
		} {
			out.Reset()
			line.log()
			klog.Flush()
			// Besides its long parts a line has the time, the level, the keys and how much is cut.
			if n := out.Len(); n == 0 || n > line.most+value-1 {
				t.Errorf("%s, line %d: %d bytes, want at most %d and its frame", format, i, n, line.most)
			}
			if !strings.Contains(out.String(), "bytes more)") {
				t.Errorf("%s, line %d does not say that it is cut: %.200s", format, i, out.String())
			}
		}
		stop()
		slog.SetDefault(before)
		klog.ClearLogger()
	}
	if got := truncate("aä", 2); got != fmt.Sprintf("a… (%d bytes more)", len("ä")) {
		t.Errorf("%q", got)
	}
}
