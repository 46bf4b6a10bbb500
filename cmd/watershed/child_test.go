package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A process that ends twice with the same error is not restarted if onRefused returns true. A process that panics, is
// killed or ends with another error is restarted.
func TestRefusedProcessesAreNotRestarted(t *testing.T) {
	spawn := make(spawner)
	go spawn.run()
	t.Cleanup(func() { close(spawn) })
	for name, c := range map[string]struct {
		script string
		once   bool // onRefused is called once, and the process is not restarted
	}{
		"a reason":      {"echo 'watershed -c: why' >&2; exit 1", true},
		"other reasons": {"echo \"watershed -c: $$\" >&2; exit 1", false},
		"a panic":       {"echo 'watershed -c: why' >&2; exit 2", false},
		"a kill":        {"echo 'watershed -c: why' >&2; kill -9 $$", false},
		"no word":       {"exit 1", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			runs := filepath.Join(dir, "runs")
			errs := make(chan error, 10)
			p := &child{
				name: "x-0", dir: dir, program: "/bin/sh",
				args:      []string{"-c", "echo >> " + runs + "; " + c.script},
				onRefused: func(why error) bool { errs <- why; return true },
			}
			p.start(spawn)
			if c.once {
				if why := <-errs; why.Error() != "x-0: why" {
					t.Errorf("onRefused(%q)", why)
				}
				<-p.done
				return
			}
			for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
				if b, _ := os.ReadFile(runs); len(b) > 2 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("it was not started again")
				}
			}
			p.stop()
			if len(errs) > 0 {
				t.Errorf("it was refused: %v", <-errs)
			}
		})
	}
}

// A process runs on without a pid file. The pauses before the restarts of a failing process double, and the terminal
// shows its error.
func TestFailingProcesses(t *testing.T) {
	spawn := make(spawner)
	go spawn.run()
	t.Cleanup(func() { close(spawn) })
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "x-0.pid", "x"), 0o700); err != nil { // the pid file cannot be written
		t.Fatal(err)
	}
	terminal, w := io.Pipe()
	p := &child{
		name: "x-0", dir: dir, program: "/bin/sh", show: &progress{w: w},
		args: []string{"-c", "echo 'watershed -c: first'; echo second; exit 1"},
	}
	p.start(spawn)
	var got []string
	for lines := bufio.NewScanner(terminal); len(got) < 6 && lines.Scan(); {
		got = append(got, strings.TrimPrefix(lines.Text(), "x-0 "))
	}
	go io.Copy(io.Discard, terminal) //nolint:errcheck // until the test ends
	p.stop()
	pid := fmt.Sprintf("has no pid file: open %s: is a directory", filepath.Join(dir, "x-0.pid"))
	want := []string{
		pid, "ended (first; second); it starts again in 200ms",
		pid, "ended (first; second); it starts again in 400ms",
		pid, "ended (first; second); it starts again in 800ms",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, not %q", got, want)
	}
}
