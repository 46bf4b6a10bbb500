package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"regexp"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// Lines of slog and of klog have the same keys, in both formats: component-base's and the level.
func TestLinesHaveTheKeysOfComponentBase(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	defer klog.ClearLogger()
	log := func(format string) *bytes.Buffer {
		var out bytes.Buffer
		if err := (&Options{LogFormat: format, Verbosity: 3}).StartLogs("test", &out); err != nil {
			t.Fatal(err)
		}
		klog.V(3).InfoS("HTTP", "latency", 1500*time.Microsecond, "resp", 200)
		slog.Error("failed", "error", errors.New("why"))
		return &out
	}
	text := regexp.MustCompile(`^time=\S+ level=INFO v=3 caller=telemetry/format_test.go:\d+ msg=HTTP service=test ` +
		`logger=kubernetes latency=1.5ms resp=200\n` +
		`time=\S+ level=ERROR caller=telemetry/format_test.go:\d+ msg=failed service=test err=why\n$`)
	if out := log(textFormat); !text.Match(out.Bytes()) {
		t.Errorf("%s", out)
	}
	var line struct {
		TS, V                   float64
		Level, Caller, Msg, Err string
		Latency                 string
	}
	lines := json.NewDecoder(log(jsonFormat))
	if err := lines.Decode(&line); err != nil {
		t.Fatal(err)
	}
	if age := float64(time.Now().UnixMilli()) - line.TS; age < -1 || age > 60_000 || line.V != 3 ||
		line.Level != "INFO" || line.Msg != "HTTP" || line.Latency != "1.5ms" {
		t.Errorf("%+v", line)
	}
	if err := lines.Decode(&line); err != nil || line.Level != "ERROR" || line.Err != "why" {
		t.Errorf("%+v, %v", line, err)
	}
}
