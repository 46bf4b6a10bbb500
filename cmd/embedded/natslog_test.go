package embedded

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"

	"watershed.dev/platform/telemetry"
)

// NATS' errors and warnings are lines of the process's log. Lines that any client can cause are not.
func TestLinesOfNATS(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	var out bytes.Buffer
	if err := (&telemetry.Options{}).StartLogs("nats", &out); err != nil {
		t.Fatal(err)
	}
	natsLog{}.Noticef("Server is ready")
	natsLog{}.Warnf("%s is slow", "JetStream")
	natsLog{}.Errorf("JetStream out of resources: %v", "disk")
	natsLog{}.Errorf("10.0.0.1:5 - cid:7 - TLS handshake error: %v", "EOF")
	text := out.String()
	for _, want := range []string{`level=WARN caller=embedded/natslog.go:`, ` msg="JetStream is slow" `,
		` msg="JetStream out of resources: disk" service=nats logger=nats`} {
		if strings.Count(text, want) != 1 || strings.Count(text, "\n") != 2 {
			t.Errorf("no %s: %s", want, text)
		}
	}
}

// The error of a server that cannot start is NATS' own, not the end of a timeout.
func TestAServerThatCannotStartNamesTheReason(t *testing.T) {
	n := &NATS{Dir: t.TempDir()}
	if err := os.WriteFile(n.storage(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := n.Runner().Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "NATS does not start: Can't start JetStream: ") {
		t.Error(err)
	}
}
