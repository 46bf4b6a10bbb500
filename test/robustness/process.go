package main

import (
	"errors"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"watershed.dev/test/tamper"
)

// process is a process of the cluster. It restarts whenever it ends.
//
//	running → (fault, or an unexpected end) → down for p.down → p.damage → running
type process struct {
	name, program string
	args          []string
	// data is the process's --data-dir. Empty: it has none.
	data    string
	cluster *cluster

	mu      sync.Mutex
	cmd     *exec.Cmd
	disk    *tamper.Disk // of cmd
	done    chan struct{}
	stopped bool
	// down is the delay before the next restart.
	down           time.Duration
	endExpected    bool
	unexpectedEnds int
	// damage changes the data before the next restart. Nil: the data stay.
	damage func() error
	// damaged is true until the process restarts with damaged files. mayEnd is true after that: a NATS server removes a
	// corrupt snapshot, and ends.
	damaged, mayEnd bool
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
			if !p.endExpected && !p.mayEnd {
				p.unexpectedEnds++
				log.Printf("%s ended by itself: %v", p.name, err)
			}
			p.mayEnd = p.endExpected && (p.damaged || p.mayEnd)
			p.endExpected, p.damaged = false, false
			down := max(p.down, 50*time.Millisecond)
			p.mu.Unlock()
			time.Sleep(down)
		}
	}()
}

func (p *process) once() error {
	out, err := os.OpenFile(filepath.Join(p.cluster.dir, p.name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	p.mu.Lock()
	damage := p.damage
	p.damage = nil
	p.mu.Unlock()
	if damage != nil {
		if err := damage(); err != nil {
			log.Printf("The data of %s are not damaged: %v", p.name, err)
		}
	}
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

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(s)
	}
}

// kill kills the process if it runs. It restarts after down.
func (p *process) kill(down time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killLocked(down)
}

func (p *process) killLocked(down time.Duration) {
	p.down = down
	if p.cmd != nil && p.cmd.Process != nil {
		p.endExpected = true
		_ = p.cmd.Process.Kill()
	}
}

// lose kills the process, and changes its data before it restarts. damaged: its files are damaged, so it may end.
func (p *process) lose(down time.Duration, damaged bool, damage func() error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.damage, p.damaged = damage, damaged
	p.killLocked(down)
}

// freeze stops processes for a duration. They are not dead.
func freeze(processes []*process, lasts time.Duration) {
	for _, p := range processes {
		p.signal(syscall.SIGSTOP)
	}
	time.Sleep(lasts)
	for _, p := range processes {
		p.signal(syscall.SIGCONT)
	}
}

// ends returns how often the process has ended by itself.
func (p *process) ends() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unexpectedEnds
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
