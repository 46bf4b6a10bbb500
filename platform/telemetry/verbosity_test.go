package telemetry

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

// The verbosity changes while the process runs, for slog and for klog.
func TestTheVerbosityChanges(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	var out bytes.Buffer
	o := Options{}
	stop, err := o.Start(t.Context(), "test", &out)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for _, c := range []struct {
		body string
		code int
		logs bool
	}{{"4", 200, true}, {"x", 400, true}, {"-1", 400, true}, {"0", 200, false}, {strings.Repeat("1", 100), 400, false}} {
		w := httptest.NewRecorder()
		putVerbosity(w, httptest.NewRequest(http.MethodPut, "/debug/flags/v", strings.NewReader(c.body)))
		out.Reset()
		slog.Debug("slog's line")
		klog.V(3).Info("klog's line")
		if n := strings.Count(out.String(), "'s line"); w.Code != c.code || n != map[bool]int{true: 2}[c.logs] {
			t.Errorf("%q: %d, and %d lines: %s", c.body, w.Code, n, &out)
		}
	}
}
