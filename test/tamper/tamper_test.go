package tamper

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestMain is the controlled process if TAMPER_FILE names a file. For each byte of its input, it writes and syncs the
// file. It prints the wall clock, and how long this took by the monotonic clock.
func TestMain(m *testing.M) {
	path := os.Getenv("TAMPER_FILE")
	if path == "" {
		os.Exit(m.Run())
	}
	f, err := os.Create(path)
	if err != nil {
		panic(err)
	}
	for input := []byte{0}; ; {
		if _, err := os.Stdin.Read(input); err != nil {
			return
		}
		began := time.Now()
		if _, err := f.WriteAt(input, 0); err != nil {
			panic(err)
		}
		if err := f.Sync(); err != nil {
			panic(err)
		}
		fmt.Println(began.Unix(), int64(time.Since(began)))
	}
}

// newCommand returns the controlled process, which is not started, and its input.
func newCommand(t *testing.T) (*exec.Cmd, io.WriteCloser) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TAMPER_FILE="+filepath.Join(t.TempDir(), "file"))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	return cmd, in
}

// A process sees the wall clock and the disk that the test sets, and its monotonic clock is right.
func TestClockAndDisk(t *testing.T) {
	cmd, in := newCommand(t)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	disk, err := StartWithDisk(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	lines := bufio.NewReader(out)
	measure := func() (ahead, took time.Duration) {
		t.Helper()
		if _, err := io.WriteString(in, "x"); err != nil {
			t.Fatal(err)
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		var wall int64
		if _, err := fmt.Sscan(line, &wall, &took); err != nil {
			t.Fatal(err)
		}
		return time.Unix(wall, 0).Sub(time.Now().Truncate(time.Second)), took
	}
	const tolerance = 30 * time.Second
	for _, want := range []time.Duration{0, 2 * time.Hour, -30 * 24 * time.Hour, 0} {
		if err := SetClock(cmd.Process.Pid, want); errors.Is(err, errors.ErrUnsupported) {
			want = 0
		} else if err != nil {
			t.Fatal(err)
		}
		if ahead, took := measure(); (ahead-want).Abs() > tolerance || took < 0 || took > tolerance {
			t.Errorf("with a clock %v ahead, the process's is %v ahead, and a sync takes %v", want, ahead, took)
		}
	}
	disk.Slow(200 * time.Millisecond)
	if _, took := measure(); took < 400*time.Millisecond { // a write and a sync
		t.Errorf("a slow write and sync take %v", took)
	}
	disk.Slow(0)
}

// A process that waits for its slow disk can be killed.
func TestASlowProcessCanBeKilled(t *testing.T) {
	cmd, in := newCommand(t)
	disk, err := StartWithDisk(cmd)
	if err != nil {
		t.Fatal(err)
	}
	disk.Slow(time.Minute)
	if _, err := io.WriteString(in, "x"); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _ = cmd.Wait(); time.Since(began) > 30*time.Second {
		t.Errorf("the process ended after %v", time.Since(began))
	}
}
