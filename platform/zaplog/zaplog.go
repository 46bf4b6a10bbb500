// Package zaplog writes the lines of etcd's server, which logs with zap, to the process's log. It starts no goroutine.
package zaplog

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// New returns a logger whose errors have errorLevel in the process's log. All other lines have verbosity 4.
func New(errorLevel slog.Leveler) *zap.Logger { return zap.New(&core{errorLevel: errorLevel}) }

// core implements zapcore.Core.
type core struct {
	errorLevel slog.Leveler
	fields     []zapcore.Field
}

func (c *core) level(l zapcore.Level) slog.Level {
	if l >= zapcore.ErrorLevel {
		return c.errorLevel.Level()
	}
	return slog.LevelDebug
}

// Enabled implements zapcore.Core.
func (c *core) Enabled(l zapcore.Level) bool {
	return slog.Default().Enabled(context.Background(), c.level(l))
}

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{c.errorLevel, slices.Concat(c.fields, fields)}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Write implements zapcore.Core.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	all := zapcore.NewMapObjectEncoder()
	for _, f := range slices.Concat(c.fields, fields) {
		f.AddTo(all)
	}
	attrs := []any{"logger", "etcd"}
	for _, key := range slices.Sorted(maps.Keys(all.Fields)) {
		attrs = append(attrs, key, all.Fields[key])
	}
	slog.Log(context.Background(), c.level(e.Level), e.Message, attrs...)
	if e.Level >= zapcore.PanicLevel { // etcd ends the process now, and a full disk may have no room for the log
		text := e.Message
		if err := all.Fields["error"]; err != nil {
			text = fmt.Sprintf("%s: %v", text, err)
		}
		fmt.Fprintf(lastWords, "watershed etcd: %s\n", text) // `split` shows the line with this prefix
	}
	return nil
}

// lastWords receives the reason why etcd ends the process. Tests replace it.
var lastWords io.Writer = os.Stderr

// Sync implements zapcore.Core.
func (c *core) Sync() error { return nil }
