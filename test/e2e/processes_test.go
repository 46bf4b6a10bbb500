package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"watershed.dev/test/harness"
)

// pid returns the process ID of a process of split.
func pid(t *testing.T, s *harness.Server, name string) int {
	t.Helper()
	return pids(t, s, name)[0]
}

// pids returns the process IDs of the processes of split whose names match a pattern.
func pids(t *testing.T, s *harness.Server, pattern string) (all []int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.Dir, pattern+".pid"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no process is called %s (%v)", pattern, err)
	}
	for _, f := range files {
		_, n := readPID(t, f)
		all = append(all, n)
	}
	return all
}

// readPID returns the content of a file, and the process ID that it names.
func readPID(t *testing.T, file string) (content string, process int) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		process, err = strconv.Atoi(strings.TrimSpace(string(data)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(data), process
}

// kill kills the process that a file names, and returns the file's content.
func kill(t *testing.T, pidFile string) string {
	t.Helper()
	content, process := readPID(t, pidFile)
	if err := syscall.Kill(process, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return content
}

// freeze stops a process until the test ends. Its connections stay open.
func freeze(t *testing.T, process int) {
	t.Helper()
	if err := syscall.Kill(process, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(process, syscall.SIGCONT) })
}
