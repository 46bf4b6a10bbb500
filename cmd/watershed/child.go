package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"watershed.dev/platform/lifecycle"
)

// child is one child process and its place.
type child struct {
	// name is the process's, and dir where its log and pid file go.
	name, dir string
	// program is what runs, with args.
	program string
	args    []string
	logs    logFiles
	// command, config and debug are of split's: the subcommand, its file, and where the process shows itself.
	command, config, debug string
	// onRefused, if it is not nil, is told when the process has said twice in a row why it does not run. Once it answers
	// true the process is not started again.
	onRefused func(why error) bool

	mu      sync.Mutex
	cmd     *exec.Cmd
	stopped bool
	done    chan struct{}
}

func (p *child) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.cmd.Process == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

type spawnRequest struct {
	cmd  *exec.Cmd
	done chan error
}

// spawner starts the children from one thread that never ends: they are to die with their parent, and the kernel
// means by that the thread.
type spawner chan spawnRequest

// run starts what is asked for, for as long as the process lasts.
func (s spawner) run() {
	runtime.LockOSThread()
	for r := range s {
		r.done <- r.cmd.Start()
	}
}

// start runs the process, and again whenever it ends, until stop, leave or refused.
func (p *child) start(s spawner) {
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		log := p.logs.open(filepath.Join(p.dir, p.name+".log"))
		defer log.Close()
		var previous string
		for {
			lastError, err := p.runOnce(s, log)
			p.mu.Lock()
			stopped := p.stopped
			p.mu.Unlock()
			if stopped {
				return
			}
			if p.onRefused != nil && lastError != "" && lastError == previous && p.onRefused(fmt.Errorf("%s: %s", p.name, lastError)) {
				return
			}
			previous = lastError
			fmt.Fprintf(os.Stderr, "%s ended (%v); starting it again\n", p.name, err)
			time.Sleep(restartPause)
		}
	}()
}

// runOnce runs the process until it ends. said is why it does not run, if that is what it told.
func (p *child) runOnce(s spawner, log io.Writer) (lastError string, err error) {
	out := &output{file: log}
	cmd := exec.Command(p.program, p.args...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return "", nil
	}
	r := spawnRequest{cmd, make(chan error)}
	s <- r
	err = <-r.done
	p.cmd = cmd
	p.mu.Unlock()
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(p.dir, p.name+".pid"), fmt.Appendf(nil, "%d\n",
		cmd.Process.Pid), 0o600); err != nil {
		_ = cmd.Process.Kill() // there is never a second one beside it
		_ = cmd.Wait()
		return "", err
	}
	err = cmd.Wait()
	if ended := new(exec.ExitError); errors.As(err, &ended) && ended.ExitCode() == exitFailure {
		lastError = out.lastError("watershed " + p.command + ": ")
	}
	return lastError, err
}

// exitFailure is what the program ends with when it has told why; a panic ends it with another.
const exitFailure = 1

// disableRestart keeps the process from being started again when it ends: all are about to be stopped.
func (p *child) disableRestart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
}

// stop asks the process to end and waits until it has.
func (p *child) stop() {
	p.mu.Lock()
	p.stopped = true
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
	p.mu.Unlock()
	select {
	case <-p.done:
	case <-time.After(lifecycle.StopTimeout):
		p.mu.Lock()
		_ = p.cmd.Process.Kill()
		p.mu.Unlock()
		<-p.done
	}
	_ = os.Remove(filepath.Join(p.dir, p.name+".pid"))
}
