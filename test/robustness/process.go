package main

import (
	"errors"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"watershed.dev/test/harness"
	"watershed.dev/test/tamper"
)

// process is a process of the cluster. It restarts whenever it ends.
//
//	running → (fault, or an unexpected end) → down for p.down → p.changes → running
type process struct {
	name, program string
	args          []string
	// data is the process's --data-dir, and peer its --listen-peer-urls. Empty: it has none.
	data, peer string
	cluster    *cluster

	mu      sync.Mutex
	cmd     *exec.Cmd
	disk    *tamper.Disk // of cmd
	done    chan struct{}
	stopped bool
	// down is the delay before the next restart.
	down        time.Duration
	endExpected bool
	// errors has the last line of the log at each unexpected end.
	errors []string
	// changes change the data, the program or the arguments before the next restart, in order.
	changes []func() error
	// changed counts the changes that have succeeded.
	changed int
}

// start runs the process, and restarts it whenever it ends.
func (p *process) start() {
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		for {
			err := p.once()
			p.mu.Lock()
			if p.stopped {
				p.mu.Unlock()
				return
			}
			if !p.endExpected {
				out, _ := os.ReadFile(p.log())
				line := harness.LastLine(out)
				p.errors = append(p.errors, line)
				log.Printf("%s ended by itself: %v: %s", p.name, err, line)
			}
			p.endExpected = false
			down := max(p.down, 50*time.Millisecond)
			p.mu.Unlock()
			time.Sleep(down)
		}
	}()
}

func (p *process) once() error {
	out, err := os.OpenFile(p.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	p.change()
	cmd := exec.Command(p.program, p.args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return nil
	}
	if p.disk, err = tamper.StartWithDisk(cmd); errors.Is(err, errors.ErrUnsupported) {
		log.Printf("No disk is slow: %v", err)
		p.disk, err = nil, cmd.Start()
	}
	p.cmd = cmd
	p.mu.Unlock()
	if err != nil {
		return err
	}
	err = cmd.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = nil
	return err
}

// change makes the changes in order, also changes that are added meanwhile.
func (p *process) change() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.changes) > 0 {
		next := p.changes[0]
		p.changes = p.changes[1:]
		p.mu.Unlock()
		err := next()
		p.mu.Lock()
		if err != nil {
			log.Printf("%s starts without a change: %v", p.name, err)
			continue
		}
		p.changed++
	}
}

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(s)
	}
}

// kill kills the process if it runs. It restarts after down.
func (p *process) kill(down time.Duration) { p.end(syscall.SIGKILL, down, nil) }

// end sends a signal that ends the process, if it runs. The process restarts after down, and after change if change is
// not nil. change may set the process's program and args.
func (p *process) end(s syscall.Signal, down time.Duration, change func() error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	if change != nil {
		p.changes = append(p.changes, change)
	}
	if p.cmd != nil && p.cmd.Process != nil {
		p.endExpected = true
		_ = p.cmd.Process.Signal(s)
	}
}

// freeze stops processes for a duration. They are not dead.
func freeze(processes []*process, lasts time.Duration) {
	signalAll(processes, syscall.SIGSTOP)
	time.Sleep(lasts)
	signalAll(processes, syscall.SIGCONT)
}

func signalAll(processes []*process, s syscall.Signal) {
	for _, p := range processes {
		p.signal(s)
	}
}

// ends returns the last line of the log at each end of the process by itself.
func (p *process) ends() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.errors)
}

// log returns the file of the process's output.
func (p *process) log() string { return filepath.Join(p.cluster.dir, p.name+".log") }

// made returns the number of changes that have succeeded.
func (p *process) made() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

// setClock sets how far the process's wall clock is ahead, until it ends.
func (p *process) setClock(ahead time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.cmd.Process == nil {
		return
	}
	if err := tamper.SetClock(p.cmd.Process.Pid, ahead); err != nil && !errors.Is(err, os.ErrNotExist) { // it has ended
		log.Printf("The clock of %s does not jump: %v", p.name, err)
	}
}

// slowDisk sets how much longer writes of the process take, until it ends.
func (p *process) slowDisk(delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.disk != nil {
		p.disk.Slow(delay)
	}
}

func (p *process) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}

func (p *process) stop() {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGKILL)
	if p.done != nil {
		<-p.done
	}
}
