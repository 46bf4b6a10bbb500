package main

import (
	"context"
	"log"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// fault is a fault and its duration.
type fault struct {
	kind     string
	target   int
	lasts    time.Duration
	pause    time.Duration
	together bool // the next fault begins before this fault ends
}

// faults generates all faults from the seed.
func (c *cluster) faults(o options) []fault {
	r := rand.New(rand.NewPCG(o.seed, 1))
	var all []fault
	for range o.faults {
		f := fault{
			lasts:    time.Duration(50+r.IntN(1500)) * time.Millisecond,
			pause:    time.Duration(100+r.IntN(700)) * time.Millisecond,
			together: r.IntN(3) == 0,
		}
		switch n := r.IntN(24); {
		case n == 23:
			f.kind = "lose the log"
		case n == 22: // the replicas' memory is lost while the log cannot be read
			f.kind, f.lasts = "blackout", time.Duration(2000+r.IntN(6000))*time.Millisecond
		case n == 20: // longer than replicas take to report that they are behind
			f.kind, f.lasts = "stall", time.Duration(2000+r.IntN(10000))*time.Millisecond
		case n == 21:
			f.kind, f.target = "corrupt", r.IntN(1<<20)
		case n < 8:
			f.kind, f.target = "kill", r.IntN(len(c.processes))
		case n < 13:
			f.kind, f.target = "pause", r.IntN(len(c.processes))
		case n < 15:
			f.kind, f.target = "term", r.IntN(len(c.processes))
		case n < 17:
			f.kind, f.target = "cut", r.IntN(len(c.links))
		case n < 19:
			f.kind, f.target = "hang", r.IntN(len(c.links))
		default:
			f.kind, f.target = "isolate", r.IntN(len(c.processes))
		}
		all = append(all, f)
	}
	return all
}

// calmEvery is the number of faults between pauses for the cluster to recover.
const calmEvery = 25

// inject injects the faults in order, and returns the number of faults of each kind.
func (c *cluster) inject(ctx context.Context, o options, progress func() string) map[string]int {
	counts := map[string]int{}
	var wg sync.WaitGroup
	for n, f := range c.faults(o) {
		if ctx.Err() != nil {
			break
		}
		counts[f.kind]++
		if f.together {
			wg.Go(func() { c.do(f) })
		} else {
			c.do(f)
		}
		time.Sleep(f.pause)
		if (n+1)%calmEvery == 0 {
			wg.Wait()
			time.Sleep(2 * time.Second)
			log.Printf("%d faults; %s", n+1, progress())
		}
	}
	wg.Wait()
	return counts
}

func (c *cluster) do(f fault) {
	switch f.kind {
	case "kill":
		c.processes[f.target].kill(f.lasts)
	case "term": // an orderly stop, as in a rolling restart
		p := c.processes[f.target]
		p.mu.Lock()
		p.endExpected, p.down = true, f.lasts
		p.mu.Unlock()
		p.signal(syscall.SIGTERM)
	case "pause":
		p := c.processes[f.target]
		p.signal(syscall.SIGSTOP)
		time.Sleep(2 * f.lasts)
		p.signal(syscall.SIGCONT)
	case "stall", "blackout": // all NATS servers are stopped but not dead
		if !c.hasNATS() { // each host has its own
			c.do(fault{kind: "pause", target: c.anyHost(f), lasts: f.lasts})
			return
		}
		if f.kind == "blackout" { // and the replicas restart
			for _, p := range c.processes {
				if strings.HasPrefix(p.name, "watchfanout-") {
					p.kill(0)
				}
			}
		}
		for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			for _, p := range c.processes {
				if strings.HasPrefix(p.name, "nats-") {
					p.signal(s)
				}
			}
			if s == syscall.SIGSTOP {
				time.Sleep(f.lasts)
			}
		}
	case "lose the log": // NATS restarts with an empty disk
		if !c.hasNATS() { // a host does
			c.processes[c.anyHost(f)].lose(f.lasts)
			return
		}
		for _, p := range c.processes {
			if strings.HasPrefix(p.name, "nats-") {
				p.lose(f.lasts)
			}
		}
	case "corrupt":
		c.corrupt(f.target)
	case "cut":
		c.links[f.target].set(refuse)
		time.Sleep(f.lasts)
		c.links[f.target].set(pass)
	case "hang": // packets are lost without a reset
		c.links[f.target].set(hang)
		time.Sleep(4 * f.lasts)
		c.links[f.target].set(pass)
	case "isolate":
		name := c.processes[f.target].name
		var mine []*link
		for _, l := range c.links {
			if l.from == name || l.to == name {
				mine = append(mine, l)
			}
		}
		for _, l := range mine {
			l.set(hang)
		}
		time.Sleep(2 * f.lasts)
		for _, l := range mine {
			l.set(pass)
		}
	}
}

// hasNATS reports whether NATS has processes of its own.
func (c *cluster) hasNATS() bool {
	return slices.ContainsFunc(c.processes, func(p *process) bool { return strings.HasPrefix(p.name, "nats-") })
}

// anyHost returns the index of a host. The fault, and so the seed, determines the host.
func (c *cluster) anyHost(f fault) int {
	first := slices.IndexFunc(c.processes, func(p *process) bool { return strings.HasPrefix(p.name, "host-") })
	return first + int(f.pause/time.Millisecond)%hostCount
}
