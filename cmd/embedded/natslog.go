package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
)

// natsLog writes the lines of the NATS server to the process's log (server.Logger). Notices have verbosity 4.
type natsLog struct {
	// routeClosed receives a value, if it has room, when a route to another server has closed. NATS reports this only
	// in its log: TestALostLeaderIsReplaced fails if it changes the line. May be nil.
	routeClosed chan<- struct{}
	// fatal receives the first error that ends the server's start. May be nil.
	fatal chan<- error
}

// Noticef implements server.Logger.
func (l natsLog) Noticef(format string, v ...any) {
	if strings.Contains(format, "connection closed") && len(v) > 0 && v[0] == "Router" {
		select {
		case l.routeClosed <- struct{}{}:
		default:
		}
	}
	logNATS(slog.LevelDebug, format, v...)
}

// Warnf implements server.Logger.
func (natsLog) Warnf(format string, v ...any) { logNATS(slog.LevelWarn, format, v...) }

// Fatalf implements server.Logger. NATS' own program ends after it. The server does not start, or lacks a listener.
func (l natsLog) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- fmt.Errorf("NATS does not start: "+format, v...):
	default:
	}
	logNATS(slog.LevelError, format, v...)
}

// Errorf implements server.Logger.
func (natsLog) Errorf(format string, v ...any) { logNATS(slog.LevelError, format, v...) }

// Debugf implements server.Logger. The server does not call it.
func (natsLog) Debugf(string, ...any) {}

// Tracef implements server.Logger. The server does not call it.
func (natsLog) Tracef(string, ...any) {}

// logNATS logs a line. Lines about a connection have verbosity 4, because a client without a certificate can cause any
// number of them. They begin with the connection's address and ID.
func logNATS(level slog.Level, format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, " - cid:") || strings.Contains(text, " - rid:") {
		level = slog.LevelDebug
	}
	slog.Log(context.Background(), level, text, "logger", "nats")
}
