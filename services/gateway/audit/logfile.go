package audit

import (
	"io"
	"os"
	"path/filepath"
	"sync"

	"gopkg.in/natefinch/lumberjack.v2"
)

// open opens the file for appending. Only the owner can read it.
func (l *LogConfig) open() (io.Writer, error) {
	if l.Path == "-" {
		return os.Stdout, nil
	}
	if err := os.MkdirAll(filepath.Dir(l.Path), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(l.Path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	w := &lineWriter{out: f, partial: endsInPartialLine(l.Path)}
	if l.MaxSize == 0 {
		return w, nil
	}
	w.out = &lumberjack.Logger{
		Filename:   l.Path,
		MaxAge:     l.MaxAge,
		MaxBackups: l.MaxBackups,
		MaxSize:    l.MaxSize,
		Compress:   l.Compress,
	}
	return w, f.Close()
}

// lineWriter begins each event on a line of its own. A killed server or a full disk leaves a part of an event's line.
// Without a line break, the next event would continue that line, and no reader could parse it.
type lineWriter struct {
	mu      sync.Mutex
	out     io.Writer
	partial bool // the last line has no line break
}

// Write implements io.Writer. b is a whole line.
func (w *lineWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := b
	if w.partial {
		line = append([]byte{'\n'}, b...)
	}
	n, err := w.out.Write(line)
	if n > 0 {
		w.partial = line[n-1] != '\n'
	}
	return max(0, n-(len(line)-len(b))), err
}

// endsInPartialLine returns true for a file whose last line has no line break.
func endsInPartialLine(path string) bool {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 { // opening a pipe would take events from its reader
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	last := make([]byte, 1)
	_, err = f.ReadAt(last, info.Size()-1)
	return err == nil && last[0] != '\n'
}
