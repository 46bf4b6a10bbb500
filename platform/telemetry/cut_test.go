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

// A log line stays short, however long the path, the user or the error that a client caused, whichever library logs it.
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
		lines := []func(){
			func() { slog.Error("A request went on", "path", long, "panic", long) },
			func() { slog.Error(long, "error", errors.New(long)) },
			func() { slog.Error("any", "value", struct{ Path []string }{[]string{long, long}}) },
			func() { slog.Error("group", slog.Group("request", "path", long)) },
			func() { slog.With("path", long).Error("with") },
			func() { klog.ErrorS(errors.New(long), "Timeout or abort while handling", "URI", long, "auditID", "a") },
			func() { klog.Errorf("bad URI %q", long) },
		}
		for i, log := range lines {
			out.Reset()
			log()
			klog.Flush()
			if n := out.Len(); n == 0 || n > maxStackBytes+4*maxMessageBytes {
				t.Errorf("%s, line %d: %d bytes", format, i, n)
			}
			if !strings.Contains(out.String(), "bytes more)") {
				t.Errorf("%s, line %d does not say that it is cut: %.200s", format, i, out.String())
			}
		}
		stop()
		slog.SetDefault(before)
		klog.ClearLogger()
	}
	if got := cut("aä", 2); got != fmt.Sprintf("a… (%d bytes more)", len("ä")) {
		t.Errorf("%q", got)
	}
}
