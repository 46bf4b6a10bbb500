package main

import (
	"fmt"
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
	// command, config and debug are of split's: the subcommand, its file, and where the process shows itself.
	command, config, debug string

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

// start runs the process, and again whenever it ends, until stop.
func (p *child) start(s spawner) {
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		for {
			err := p.once(s)
			p.mu.Lock()
			stopped := p.stopped
			p.mu.Unlock()
			if stopped {
				return
			}
			fmt.Fprintf(os.Stderr, "%s ended (%v); starting it again\n", p.name, err)
			time.Sleep(restartPause)
		}
	}()
}

func (p *child) once(s spawner) error {
	log, err := os.OpenFile(filepath.Join(p.dir, p.name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.program, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return nil
	}
	r := spawnRequest{cmd, make(chan error)}
	s <- r
	err = <-r.done
	p.cmd = cmd
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(p.dir, p.name+".pid"), fmt.Appendf(nil, "%d\n",
		cmd.Process.Pid), 0o600); err != nil {
		_ = cmd.Process.Kill() // there is never a second one beside it
		_ = cmd.Wait()
		return err
	}
	return cmd.Wait()
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
