package zaplog

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"watershed.dev/platform/telemetry"
)

// An error is a line of the process's log. Other lines, and errors that are expected, need verbosity 4.
func TestLinesOfZap(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	for verbosity, want := range map[int]string{
		0: "level=ERROR msg=failed service=x logger=etcd err=why member=1\n",
		4: "level=ERROR msg=failed service=x logger=etcd err=why member=1\n" +
			"level=INFO v=4 msg=slow service=x logger=etcd member=1\n" +
			"level=INFO v=4 msg=closed service=x logger=etcd\n",
	} {
		var out bytes.Buffer
		if err := (&telemetry.Options{Verbosity: verbosity}).StartLogs("x", &out); err != nil {
			t.Fatal(err)
		}
		var level slog.LevelVar
		level.Set(slog.LevelError)
		root := New(&level)
		log := root.With(zap.Int("member", 1))
		log.Error("failed", zap.Error(errors.New("why")))
		log.Warn("slow")
		level.Set(slog.LevelDebug)
		root.Error("closed")
		var got strings.Builder
		for line := range strings.Lines(out.String()) {
			for _, word := range strings.SplitAfter(line, " ") {
				if !strings.HasPrefix(word, "time=") && !strings.HasPrefix(word, "caller=") {
					got.WriteString(word)
				}
			}
		}
		if got.String() != want {
			t.Errorf("at verbosity %d:\n%swant\n%s", verbosity, &got, want)
		}
	}
}

// The reason why etcd ends the process is on standard error, because the log may be on a full disk.
func TestLastWords(t *testing.T) {
	var out bytes.Buffer
	before := lastWords
	lastWords = &out
	defer func() { lastWords = before }()
	log := zap.New(New(slog.LevelError).Core(), zap.WithFatalHook(zapcore.WriteThenGoexit))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		log.Fatal("failed to save Raft hard state and entries", zap.Error(errors.New("no space left on device")))
	}()
	<-ended
	want := "watershed etcd: failed to save Raft hard state and entries: no space left on device\n"
	if got := out.String(); got != want {
		t.Errorf("%q, not %q", got, want)
	}
}
