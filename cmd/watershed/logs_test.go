package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// A log file grows to its maximum size, and a fixed number of rotated files remains.
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
			if info, err := f.Info(); err == nil { // lumberjack removes rotated files concurrently
				bytes += info.Size()
			}
		}
		return bytes
	}
	for deadline := time.Now().Add(2 * time.Minute); size() > (1+oldLogFiles)<<20; time.Sleep(10 * time.Millisecond) {
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

// A log file that cannot be written is reported once. Its process continues.
func TestALogFileThatFailsIsReported(t *testing.T) {
	var faults bytes.Buffer
	log := new(logFiles).open(filepath.Join(t.TempDir(), "no\x00name", "x.log"))
	log.faults = &faults
	out := &output{file: log}
	for range 3 {
		if n, err := out.Write([]byte("line\n")); n != 5 || err != nil {
			t.Error(n, err)
		}
	}
	if text := faults.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "x.log") {
		t.Errorf("%q", text)
	}
}

// A file larger than the maximum is removed. A smaller file is appended to.
func TestALogFileThatIsTooLargeIsRemoved(t *testing.T) {
	for size, files := range map[int64]int{1<<20 + 1: 1, 1 << 10: 1, 1 << 20: 2} {
		dir := t.TempDir()
		path := filepath.Join(dir, "x.log")
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), int(size)), 0o600); err != nil {
			t.Fatal(err)
		}
		log := (&logFiles{maxSize: 1}).open(path)
		if _, err := io.WriteString(log, "line\n"); err != nil {
			t.Fatal(err)
		}
		_ = log.Close()
		all, err := os.ReadDir(dir)
		if err != nil || len(all) != files {
			t.Errorf("after one of %d bytes there are %v, %v", size, all, err)
		}
		want := int64(len("line\n"))
		if size < 1<<20 {
			want += size
		}
		if info, err := os.Stat(path); err != nil || info.Size() != want {
			t.Errorf("after one of %d bytes there is %v, %v", size, info, err)
		}
	}
}

// A restarted process writes to the same log, which has one goroutine.
func TestRestartsLeaveNoGoroutine(t *testing.T) {
	mills := func() int {
		text := make([]byte, 8<<20)
		return strings.Count(string(text[:runtime.Stack(text, true)]), "(*Logger).millRun(")
	}
	spawn := make(spawner)
	defer close(spawn)
	go spawn.run()
	dir, before := t.TempDir(), mills()
	p := &child{name: "x-0", dir: dir, program: "/bin/sh", args: []string{"-c", "echo run"}}
	p.start(spawn)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if b, _ := os.ReadFile(filepath.Join(dir, "x-0.log")); strings.Count(string(b), "run\n") > 2 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it is not started again")
		}
	}
	p.stop()
	if n := mills() - before; n != 1 {
		t.Errorf("%d goroutines stay", n)
	}
}

// The last error of a process is the text after its name, on one or more lines.
func TestLastError(t *testing.T) {
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
		if got := out.lastError("watershed authn: "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
