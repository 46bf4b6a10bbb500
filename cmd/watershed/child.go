package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
)

// child is a child process. It starts again until it is stopped or refused:
//
//	start ──> running ──ended──> pause ──> running
//	          running ──ended with the same error twice, and onRefused is true──> refused: done
//	          running ──disableRestart, ended──> done
//	          running ──stop──> SIGTERM ──stopTimeout──> SIGKILL ──> done
type child struct {
	// name is the name of the process. dir is the directory of its log and pid file.
	name, dir string
	// program is the executable, which runs with args.
	program string
	args    []string
	logs    logFiles
	// set, config and debug are for split: the set of services, the configuration file, and the debug address.
	set, config, debug string
	// show prints restarts; nil: nothing does.
	show *progress
	// memoryLimit is the process's GOMEMLIMIT. Empty: this process's.
	memoryLimit string
	// stopTimeout is how long the process may take to stop; 0: lifecycle.StopTimeout.
	stopTimeout time.Duration
	// onRefused, if set, is called if the process ended twice in a row with the same error. If it returns true, the
	// process is not started again.
	onRefused func(why error) bool

	mu      sync.Mutex
	cmd     *exec.Cmd
	stopped bool
	done    chan struct{}
	// wake ends the pause before a restart.
	wake chan struct{}
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

// spawner starts the children from one OS thread that never ends. Pdeathsig kills a child when the thread that started
// it ends.
type spawner chan spawnRequest

// run starts the requested commands until the channel is closed.
func (s spawner) run() {
	runtime.LockOSThread()
	for r := range s {
		r.done <- r.cmd.Start()
	}
}

const (
	// restartPause is the delay before an ended process starts again. It doubles, up to maxRestartPause, while each run
	// is a short run.
	restartPause    = 200 * time.Millisecond
	maxRestartPause = 10 * time.Second
	shortRun        = 2 * time.Second
)

// start runs the process, and restarts it after each end, until stop, disableRestart or onRefused ends this.
func (p *child) start(s spawner) {
	p.done, p.wake = make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(p.done)
		log := p.logs.open(filepath.Join(p.dir, p.name+".log"))
		defer log.Close()
		var previous string
		pause := restartPause
		for {
			began := time.Now()
			lastError, err := p.runOnce(s, log)
			p.mu.Lock()
			stopped := p.stopped
			p.mu.Unlock()
			if stopped {
				return
			}
			if p.onRefused != nil && lastError != "" && lastError == previous &&
				p.onRefused(fmt.Errorf("%s: %s", p.name, lastError)) {
				return
			}
			previous = lastError
			if time.Since(began) > shortRun {
				pause = restartPause
			}
			if p.show != nil {
				if err == nil {
					err = errors.New("exit status 0")
				}
				reason := strings.ReplaceAll(cmp.Or(lastError, err.Error()), "\n", "; ")
				p.show.note(fmt.Sprintf("%s ended (%s); it starts again in %v", p.name, reason, pause))
			}
			select {
			case <-p.wake:
			case <-time.After(pause):
			}
			pause = min(2*pause, maxRestartPause)
		}
	}()
}

// runOnce runs the process until it ends. lastError is the error that the process printed before a regular exit.
func (p *child) runOnce(s spawner, log io.Writer) (lastError string, err error) {
	out := &output{file: log}
	cmd := exec.Command(p.program, p.args...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Second
	cmd.Env = config.Environ()
	if p.memoryLimit != "" {
		cmd.Env = append(cmd.Env, "GOMEMLIMIT="+p.memoryLimit)
	}
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
	p.writePID(cmd.Process.Pid)
	err = cmd.Wait()
	if ended := new(exec.ExitError); errors.As(err, &ended) && ended.ExitCode() == exitFailure {
		lastError = out.lastError("watershed " + p.args[0] + ": ")
	}
	return lastError, err
}

// writePID writes the pid file, which operators read. If it fails, the process runs on, because most processes need no
// disk.
func (p *child) writePID(pid int) {
	path := filepath.Join(p.dir, p.name+".pid")
	if err := os.WriteFile(path, fmt.Appendf(nil, "%d\n", pid), 0o600); err != nil {
		_ = os.Remove(path) // it may have the id of an ended process
		if p.show != nil {
			p.show.note(fmt.Sprintf("%s has no pid file: %v", p.name, err))
		}
	}
}

// exitFailure is the exit code of a command that printed its error. A panic has another exit code.
const exitFailure = 1

// disableRestart prevents a restart when the process ends, because all processes are about to stop.
func (p *child) disableRestart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
}

// stopLimit returns how long the process may take to stop.
func (p *child) stopLimit() time.Duration { return cmp.Or(p.stopTimeout, lifecycle.StopTimeout) }

// names returns the names of processes, comma separated.
func names(all []*child) string {
	var list []string
	for _, p := range all {
		list = append(list, p.name)
	}
	return strings.Join(list, ", ")
}

// stop terminates the process and waits until it has ended.
func (p *child) stop() {
	if p.done == nil { // the process was not started
		return
	}
	p.mu.Lock()
	p.stopped = true
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default: // it was stopped before
	}
	select {
	case <-p.done:
	case <-time.After(p.stopLimit()):
		p.mu.Lock()
		_ = p.cmd.Process.Kill()
		p.mu.Unlock()
		<-p.done
	}
	_ = os.Remove(filepath.Join(p.dir, p.name+".pid"))
}
