package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"runtime"
	"strconv"
	"strings"
)

// module is an element of --vmodule. Files whose name without .go matches the pattern log up to the verbosity
// (k8s.io/klog/v2, moduleSpec).
type module struct {
	pattern   string
	verbosity int
}

type modules []module

func parseModules(s string) (modules, error) {
	var all modules
	for _, part := range strings.Split(s, ",") {
		if part == "" {
			continue
		}
		pattern, n, ok := strings.Cut(part, "=")
		v, err := strconv.Atoi(n)
		if _, bad := path.Match(pattern, ""); !ok || pattern == "" || err != nil || v < 0 || bad != nil {
			return nil, fmt.Errorf("--vmodule %q: %q: want pattern=N, comma separated", s, part)
		}
		all = append(all, module{pattern, v})
	}
	return all, nil
}

// maxVerbosity returns the highest verbosity of all modules.
func (m modules) maxVerbosity() int {
	n := 0
	for _, x := range m {
		n = max(n, x.verbosity)
	}
	return n
}

// verbosityOf returns the verbosity of a file. ok is false if no pattern matches.
func (m modules) verbosityOf(file string) (verbosity int, ok bool) {
	name := strings.TrimSuffix(path.Base(file), ".go")
	for _, x := range m {
		if match, _ := path.Match(x.pattern, name); match {
			return x.verbosity, true
		}
	}
	return 0, false
}

// moduleHandler drops lines above the verbosity, unless --vmodule allows them for their file. klog applies -v and
// --vmodule before it passes a line on, but a logger from a context does not.
type moduleHandler struct {
	slog.Handler
	modules modules
}

// Handle implements slog.Handler.
func (h *moduleHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < -slog.Level(verbosity.Load()) {
		frame, _ := runtime.CallersFrames([]uintptr{r.PC}).Next()
		if v, ok := h.modules.verbosityOf(frame.File); !ok || int(r.Level) < -v {
			return nil
		}
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *moduleHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &moduleHandler{h.Handler.WithAttrs(attrs), h.modules}
}

// WithGroup implements slog.Handler.
func (h *moduleHandler) WithGroup(name string) slog.Handler {
	return &moduleHandler{h.Handler.WithGroup(name), h.modules}
}
