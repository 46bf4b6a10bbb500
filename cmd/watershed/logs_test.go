package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A log file grows to its maximum size, and a fixed number of older ones remain beside it.
func TestLogFilesAreBounded(t *testing.T) {
	dir := t.TempDir()
	f := logFiles{maxSize: 1}
	log := f.open(filepath.Join(dir, "x.log"))
	out := &output{file: log}
	line := append(bytes.Repeat([]byte("x"), 1<<16-1), '\n')
	for range 200 { // 12.5 MB
		if n, err := out.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	_ = log.Close()
	size := func() (bytes int64) {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if info, err := f.Info(); err == nil { // lumberjack removes old files beside this
				bytes += info.Size()
			}
		}
		return bytes
	}
	for deadline := time.Now().Add(20 * time.Second); size() > (1+oldLogFiles)<<20; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes of logs stay", size())
		}
	}
	if len(out.end) > endBytes {
		t.Errorf("%d bytes stay in memory", len(out.end))
	}
	bad := logFiles{maxSize: -1}
	if err := bad.validate(); err == nil || !strings.Contains(err.Error(), "--log-file-max-size -1") {
		t.Error(err)
	}
}

// A process gives as the reason for its end what follows its name, on one line or several.
func TestTheLastWordsOfAProcess(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "",
		"a line\n":                    "",
		"a\nb\nc\n\n":                 "",
		"one\nwatershed authn: why\n": "why",
		"watershed authn: first\nwatershed authn: why\nand why\n":       "why\nand why",
		"watershed authn: long ago\n" + strings.Repeat("x\n", endBytes): "",
	} {
		out := &output{file: io.Discard}
		_, _ = io.WriteString(out, text)
		if got := out.lastWords("watershed authn: "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
