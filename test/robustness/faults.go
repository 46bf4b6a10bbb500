package main

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"
)

// fault is a fault and its duration.
type fault struct {
	kind   string
	target int
	lasts  time.Duration
	pause  time.Duration
	// amount is the delay of a slow disk, or how far a clock jumps.
	amount time.Duration
	// older is true if the process gets the older binary.
	older    bool
	together bool // the next fault begins before this fault ends
	alone    bool // no other fault is under way, because the clients have requirements during this fault
}

// faultKinds are the kinds of faults, and the weight of each. New kinds come last: without them (-kinds), a seed
// determines the same faults as before.
var faultKinds = []struct {
	name   string
	weight int
}{
	{"kill", 8}, {"pause", 5}, {"term", 2}, {"cut", 2}, {"hang", 2}, {"isolate", 1}, {"stall", 1}, {"corrupt", 1},
	{"blackout", 1}, {"lose the log", 1},
	{"clock", 2}, {"slow disk", 2}, {damageLog, 2}, {"pause most", 1},
	{replaceMember, 1}, {versionSkew, 4},
	{compactEtcd, 2}, {compactPastLog, 1},
	{stopEtcd, 1}, {strandReplica, 1}, {loseMessage, 1},
	{losePower, 1},
}

// The kinds of faults that not every cluster can have (cluster.can).
const (
	replaceMember = "replace a member"
	versionSkew   = "version skew"
	damageLog     = "damage the log"
	// losePower ends all NATS servers at once. Each has lost the end of its blocks, at a different place.
	losePower = "lose power"
	// strandReplica makes a replica of the watch tier lose its connections to NATS, which hang. Its watches must go on.
	strandReplica = "strand a replica"
	// loseMessage deletes a message of the log, as a fault of JetStream may.
	loseMessage = "lose a message"
)

// stopEtcd stops all members of etcd. Lists and watches of any revision must be served.
const stopEtcd = "stop etcd"

// The kinds of faults that compact etcd.
const (
	// compactEtcd compacts revisions that the log has. Registry leaves the newest of these, until NATS has synced them.
	compactEtcd = "compact"
	// compactPastLog models another compactor of etcd, and registry after 30 minutes without NATS.
	compactPastLog = "compact past the log"
)

// kindNames returns the names of all kinds of faults.
func kindNames() (names []string) {
	for _, k := range faultKinds {
		names = append(names, k.name)
	}
	return names
}

// can returns an error if the cluster cannot have a kind of fault.
func (c *cluster) can(kind string) error {
	switch {
	case kind == replaceMember && len(c.replaceable()) == 0:
		return fmt.Errorf("-kinds: %q needs -replicas etcd=3 or nats=3", kind)
	case kind == versionSkew && c.older == "":
		return fmt.Errorf("-kinds: %q needs -older", kind)
	case kind == strandReplica && len(c.named("watchfanout-")) < 2:
		return fmt.Errorf("-kinds: %q needs -placement split and -replicas watchfanout=2", kind)
	case kind == loseMessage && !c.mayDelete:
		return fmt.Errorf("-kinds: %q needs a defect that lets the harness delete messages", kind)
	case (kind == damageLog || kind == losePower) && c.older != "":
		return fmt.Errorf("-kinds: %q cannot be with -older, which may not survive it", kind)
	}
	return nil
}

// drawKind draws from kinds, by weight.
func drawKind(r *rand.Rand, kinds []string) string {
	total := 0
	for _, k := range faultKinds {
		if slices.Contains(kinds, k.name) {
			total += k.weight
		}
	}
	n := r.IntN(total)
	for _, k := range faultKinds {
		if !slices.Contains(kinds, k.name) {
			continue
		}
		if n -= k.weight; n < 0 {
			return k.name
		}
	}
	panic("unreachable")
}

// faults generates all faults from the seed.
func (c *cluster) faults(o options) []fault {
	r := rand.New(rand.NewPCG(o.seed, 1))
	kinds := o.kinds
	if len(kinds) == 0 {
		kinds = slices.DeleteFunc(kindNames(), func(k string) bool {
			// etcd then lacks the history that refills a log, so watches expire.
			compacts := k == compactEtcd || k == compactPastLog
			return c.can(k) != nil || compacts && o.expired >= 0
		})
	}
	var all []fault
	for range o.faults {
		f := fault{
			lasts:    time.Duration(50+r.IntN(1500)) * time.Millisecond,
			pause:    time.Duration(100+r.IntN(700)) * time.Millisecond,
			together: r.IntN(3) == 0,
		}
		switch f.kind = drawKind(r, kinds); f.kind {
		case "lose the log", stopEtcd:
		case "blackout": // the replicas' memory is lost while the log cannot be read
			f.lasts = time.Duration(2000+r.IntN(6000)) * time.Millisecond
		case compactEtcd:
			if f.target = r.IntN(500); r.IntN(2) == 0 {
				f.target = 0
			}
		case "stall": // longer than replicas take to report that they are behind
			f.lasts = time.Duration(2000+r.IntN(10000)) * time.Millisecond
		case compactPastLog: // longer than a publisher waits for an acknowledgement, or not
			f.lasts = time.Duration(2000+r.IntN(12000)) * time.Millisecond
		case "corrupt", damageLog, losePower, strandReplica, loseMessage:
			f.target = r.IntN(1 << 20)
		case "cut", "hang":
			f.target = r.IntN(len(c.links))
		case "clock":
			f.target = r.IntN(len(c.processes))
			// Up to a minute, or up to three hours: the log keeps events for less than that.
			f.amount = time.Duration(1+r.IntN([]int{60, 3 * 3600}[r.IntN(2)])) * time.Second
			if r.IntN(2) == 0 {
				f.amount = -f.amount
			}
		case "slow disk":
			f.target, f.amount = r.IntN(1<<20), time.Duration(20+r.IntN(500))*time.Millisecond
		case "pause most", replaceMember:
			f.target = r.IntN(1 << 20)
		case versionSkew:
			f.target, f.older = r.IntN(1<<20), r.IntN(2) == 0
		default: // a process
			f.target = r.IntN(len(c.processes))
		}
		if slices.Contains([]string{stopEtcd, strandReplica, loseMessage}, f.kind) {
			f.alone, f.together = true, false
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
	file, err := os.Create(filepath.Join(c.dir, "faults.log"))
	if err != nil {
		log.Print(err)
	}
	defer file.Close()
	var wg sync.WaitGroup
	for n, f := range c.faults(o) {
		if ctx.Err() != nil {
			break
		}
		if f.alone {
			wg.Wait()
		}
		counts[f.kind]++
		c.begun = append(c.begun, time.Now())
		fmt.Fprintln(file, time.Now().UTC().Format("15:04:05.000"), c.describe(f))
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

// target returns the process of a fault of a single process or of its kind, otherwise nil.
func (c *cluster) target(f fault) *process {
	switch f.kind {
	case "kill", "term", "pause", "isolate", "clock":
		return c.processes[f.target]
	case damageLog:
		return c.withLog()[f.target%len(c.withLog())]
	case strandReplica:
		replicas := c.named("watchfanout-")
		return replicas[f.target%len(replicas)]
	case "slow disk", "pause most":
		return c.stores()[f.target%len(c.stores())]
	case replaceMember:
		return c.replaceable()[f.target%len(c.replaceable())]
	case versionSkew:
		return c.versioned()[f.target%len(c.versioned())]
	}
	return nil
}

// describe describes a fault in the file faults.log.
func (c *cluster) describe(f fault) string {
	name := ""
	switch p := c.target(f); {
	case p != nil:
		name = p.name
	case f.kind == compactEtcd:
		name = fmt.Sprint(f.target)
	case f.kind == "cut" || f.kind == "hang":
		name = c.links[f.target].from + " to " + c.links[f.target].to
	}
	if f.kind == versionSkew {
		name += map[bool]string{true: " older", false: " newer"}[f.older]
	}
	return fmt.Sprintf("%s %s %v, %v", f.kind, name, f.amount, f.lasts)
}

func (c *cluster) do(f fault) {
	p := c.target(f)
	switch f.kind {
	case "kill":
		p.kill(f.lasts)
	case "term": // an orderly stop, as in a rolling restart
		p.end(syscall.SIGTERM, f.lasts, nil)
	case "pause":
		freeze([]*process{p}, 2*f.lasts)
	case compactEtcd:
		c.workload.compact(f)
	case compactPastLog:
		servers := c.aLog(f)
		signalAll(servers, syscall.SIGSTOP)
		time.Sleep(f.lasts)
		c.workload.compact(f)
		signalAll(servers, syscall.SIGCONT)
	case "stall", "blackout": // all NATS servers are stopped but not dead
		if f.kind == "blackout" { // and the replicas restart
			for _, p := range c.named("watchfanout-") {
				p.kill(0)
			}
		}
		freeze(c.aLog(f), f.lasts)
	case "lose the log": // NATS restarts with an empty disk
		for _, p := range c.aLog(f) {
			p.end(syscall.SIGKILL, f.lasts, func() error { return os.RemoveAll(p.data) })
		}
	case damageLog: // a NATS server restarts with a damaged disk
		p.end(syscall.SIGKILL, f.lasts, func() error { return damageFiles(p.data, uint64(f.target)) })
	case losePower:
		for i, p := range c.aLog(f) {
			r := rand.New(rand.NewPCG(uint64(f.target), uint64(i)))
			p.end(syscall.SIGKILL, f.lasts, func() error { return truncateBlocks(p.data, r) })
		}
	case replaceMember: // a member restarts with an empty disk
		p.end(syscall.SIGKILL, f.lasts, func() error { return c.replace(p) })
	case versionSkew: // an upgrade or a rollback of a process
		p.end(syscall.SIGTERM, f.lasts, func() error {
			p.program = c.watershed
			if f.older {
				p.program = c.older
			}
			return nil
		})
	case stopEtcd:
		c.stopEtcd()
	case strandReplica:
		c.strand(p)
	case loseMessage:
		c.loseMessage(f)
	case "clock": // the wall clock jumps, and back
		p.setClock(f.amount)
		time.Sleep(4 * f.lasts)
		p.setClock(0)
	case "slow disk":
		p.slowDisk(f.amount)
		time.Sleep(4 * f.lasts)
		p.slowDisk(0)
	case "pause most": // no majority of the members responds
		members := c.named(strings.TrimRight(p.name, "0123456789"))
		freeze(members[min(1, len(members)-1):], 2*f.lasts)
	case "corrupt":
		c.workload.corrupt(f.target)
	case "cut":
		c.links[f.target].set(refuse)
		time.Sleep(f.lasts)
		c.links[f.target].set(pass)
	case "hang": // packets are lost without a reset
		c.links[f.target].set(hang)
		time.Sleep(4 * f.lasts)
		c.links[f.target].set(pass)
	case "isolate":
		c.hang(func(l *link) bool { return l.from == p.name || l.to == p.name }, func() { time.Sleep(2 * f.lasts) })
	}
}

// hang makes the links that are chosen hang during a call of while.
func (c *cluster) hang(chosen func(*link) bool, while func()) {
	var links []*link
	for _, l := range c.links {
		if chosen(l) {
			links = append(links, l)
			l.set(hang)
		}
	}
	while()
	for _, l := range links {
		l.set(pass)
	}
}

// begunBefore returns the number of faults that began before t.
func (c *cluster) begunBefore(t time.Time) int {
	return sort.Search(len(c.begun), func(i int) bool { return c.begun[i].After(t) })
}

// hasNATS reports whether NATS has processes of its own.
func (c *cluster) hasNATS() bool { return len(c.named("nats-")) > 0 }

// named returns the processes whose names begin with a prefix.
func (c *cluster) named(prefix string) (found []*process) {
	for _, p := range c.processes {
		if strings.HasPrefix(p.name, prefix) {
			found = append(found, p)
		}
	}
	return found
}

// stores returns the processes that write to a disk.
func (c *cluster) stores() []*process { return append(c.named("etcd-"), c.withLog()...) }

// withLog returns the processes with a NATS server.
func (c *cluster) withLog() []*process {
	if c.hasNATS() {
		return c.named("nats-")
	}
	return c.named("host-")
}

// aLog returns the servers of a log: all NATS servers, or a host. The fault, and so the seed, determines the host.
func (c *cluster) aLog(f fault) []*process {
	servers := c.withLog()
	if c.hasNATS() {
		return servers
	}
	n := int(f.pause/time.Millisecond) % len(servers)
	return servers[n : n+1]
}
