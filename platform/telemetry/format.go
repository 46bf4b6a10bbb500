package telemetry

import (
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"time"
)

// The values of --logging-format.
const (
	textFormat = "text"
	jsonFormat = "json"
)

// newHandler returns a handler that writes lines in a value of --logging-format to w. A line has the keys of
// component-base: caller, msg, v for its verbosity, err, and in JSON ts in milliseconds
// (k8s.io/component-base/logs/json). It also has the level, because component-base has no warnings.
func newHandler(w io.Writer, format string, level slog.Leveler) (slog.Handler, error) {
	o := &slog.HandlerOptions{Level: level, AddSource: true, ReplaceAttr: formatAttr}
	switch format {
	case textFormat, "":
		return slog.NewTextHandler(w, o), nil
	case jsonFormat:
		o.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey && a.Value.Kind() == slog.KindTime {
				return slog.Float64("ts", float64(a.Value.Time().UnixNano())/float64(time.Millisecond))
			}
			return formatAttr(groups, a)
		}
		return slog.NewJSONHandler(w, o), nil
	}
	return nil, fmt.Errorf(`--logging-format %q: want "text" or "json"`, format)
}

// formatAttr is a slog.HandlerOptions.ReplaceAttr. It writes levels, callers and durations as component-base does, and
// cuts long values.
func formatAttr(groups []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case slog.Level:
		if a.Key == slog.LevelKey && value < 0 { // its verbosity
			return slog.Attr{Value: slog.GroupValue(slog.String(a.Key, slog.LevelInfo.String()),
				slog.Int("v", -int(value)))}
		}
	case *slog.Source:
		dir, file := filepath.Split(value.File)
		return slog.String("caller", fmt.Sprintf("%s/%s:%d", filepath.Base(dir), file, value.Line))
	case time.Duration: // slog's JSON would have a number
		a.Value = slog.StringValue(value.String())
	}
	if a.Key == "error" {
		a.Key = "err"
	}
	return truncateAttr(groups, a)
}
