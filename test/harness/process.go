package harness

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Process is a child process with its own process group.
type Process struct {
	t    testing.TB
	Cmd  *exec.Cmd
	Log  string
	done chan struct{}
	err  error
}

// Start runs a program until the test ends. Its output goes to dir/name.log; a failed test prints the end of that file.
func Start(t testing.TB, dir, name, program string, args ...string) *Process {
	t.Helper()
	log := filepath.Join(dir, name+".log")
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	p := &Process{t: t, Cmd: cmd, Log: log, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("the end of %s:\n%s", log, tail(log, 3000))
		}
	})
	return p
}

// stopTimeout is how long a process may take to stop. A server itself gives up after lifecycle.StopTimeout, 30 s.
const stopTimeout = time.Minute

// Stop sends SIGTERM and waits for the process to end. It kills the process after stopTimeout, and logs that.
func (p *Process) Stop() {
	_ = p.Cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		p.Kill()
		p.t.Logf("%s did not stop within %v, and is killed. Its last output:\n%s", p.Cmd.Args[:2], stopTimeout,
			tail(p.Log, 300))
	}
}

// Wait waits for the process to exit and returns its error. After timeout it kills the process and fails the test.
func (p *Process) Wait(timeout time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-time.After(timeout):
		p.Kill()
		p.t.Errorf("%s did not exit within %v", p.Cmd.Path, timeout)
		return nil
	}
}

// Kill ends the process group with SIGKILL.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.Cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// LastLine returns the last line of an output. The error of a process that ends is its last line.
func LastLine(out []byte) string {
	out = bytes.TrimSpace(out)
	return string(out[bytes.LastIndexByte(out, '\n')+1:])
}

func tail(path string, n int) string {
	b, _ := os.ReadFile(path)
	return string(b[max(0, len(b)-n):])
}
