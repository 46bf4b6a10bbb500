// Command robustness runs `split` while its processes are killed (SIGKILL), paused (SIGSTOP, SIGCONT) and disconnected
// from each other. Clocks jump, disks are slow, and the event log is damaged. Members of etcd and NATS are replaced,
// and processes change their version. Clients read, write and watch meanwhile.
// At the end a checker validates all responses and watch events (package history). A seed determines all faults and
// their order.
//
//	robustness -faults 1000 -seed 7
//	robustness -break drop          a Watershed that loses an event: the checker must detect it
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"

	"watershed.dev/test/robustness/history"
)

// options are the parameters of a run.
type options struct {
	watershed string
	// older is another release of the binary. Empty: the version does not change.
	older  string
	dir    string
	faults int
	// kinds are the names of the kinds of faults (faultKinds). Empty: all kinds that the cluster can have.
	kinds     []string
	calm      time.Duration
	seed      uint64
	placement string
	replicas  string
	writers   int
	watchers  int
	// expired is the number of watches that may expire. Below 0: any number.
	expired int
	// mayDelete: the servers of the log let the harness delete messages.
	mayDelete bool
}

func main() {
	log.SetFlags(log.Ltime)
	var o options
	flag.StringVar(&o.watershed, "watershed", "bin/watershed", "The binary under test.")
	flag.StringVar(&o.older, "older", "", "A binary of another release: the fault version skew restarts a process with "+
		"either binary. The cluster has the older configuration. Empty: no version skew.")
	flag.StringVar(&o.dir, "out", "", "The directory of the cluster and the history; a temporary directory by "+
		"default, which stays after a failure.")
	flag.IntVar(&o.faults, "faults", 1000, "The number of faults.")
	kinds := flag.String("kinds", "",
		"The kinds of faults, comma separated. Empty: all kinds that the cluster can have.")
	flag.Uint64Var(&o.seed, "seed", 0, "The seed of the faults; 0 for a random seed.")
	flag.StringVar(&o.placement, "placement", "split",
		"The --placement of `watershed split`, or hosts: three `up` on the same etcd, or mixed: two `up` and a "+
			"kube-apiserver, with kube-controller-manager, whose clients change between the servers.")
	flag.DurationVar(&o.calm, "calm", 0, "How long the clients run without faults first.")
	flag.StringVar(&o.replicas, "replicas", "watchfanout=3", "The --replicas of `watershed split`.")
	flag.IntVar(&o.writers, "writers", 6, "The number of writing clients.")
	flag.IntVar(&o.watchers, "watchers", 24, "The number of watching clients.")
	flag.IntVar(&o.expired, "expired", -1, "The number of watches that may expire (410); the run fails if more do. "+
		"Without -kinds, no fault then compacts etcd. Below 0: any number.")
	breakAs := flag.String("break", "", "Build a Watershed with a deliberate defect, which its test or the checker must "+
		"detect: "+strings.Join(breakages(), ", ")+"; "+breakAll+"; or "+breakTests+", for the tests only.")
	flag.Parse()
	if *kinds != "" {
		o.kinds = strings.Split(*kinds, ",")
	}
	for _, k := range o.kinds {
		if !slices.Contains(kindNames(), k) {
			log.Fatalf("-kinds: there is no kind %q; the kinds are %s", k, strings.Join(kindNames(), ", "))
		}
	}
	if o.seed == 0 {
		o.seed = rand.Uint64N(1 << 32)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if *breakAs != "" {
		os.Exit(runBroken(ctx, o, *breakAs))
	}
	r, err := run(ctx, o)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(r)
	if len(r.found) > 0 {
		os.Exit(1)
	}
}

// pause waits for the time without faults, and logs the progress every minute.
func (o *options) pause(ctx context.Context, progress func() string) {
	end := time.After(o.calm)
	for minutes := time.Tick(time.Minute); ; {
		select {
		case <-ctx.Done():
			return
		case <-end:
			return
		case <-minutes:
			log.Print(progress())
		}
	}
}

// result is the outcome of a run.
type result struct {
	seed   uint64
	dir    string
	took   time.Duration
	counts map[string]int
	found  []string
}

func (r *result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %s\n", r.seed, r.took.Round(time.Second))
	var names []string
	for n := range r.counts {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		fmt.Fprintf(&b, "%8d %s\n", r.counts[n], n)
	}
	fmt.Fprintf(&b, "%8d contradictions; %d lost logs, %d watches expired, %d lists of watching clients\n",
		len(r.found), r.counts["faults: lose the log"], r.counts["watches expired (410)"],
		r.counts["lists of watching clients"])
	for i, f := range r.found {
		if i == 20 {
			fmt.Fprintf(&b, "  … and %d more\n", len(r.found)-i)
			break
		}
		fmt.Fprintln(&b, "  "+f)
	}
	if len(r.found) > 0 {
		fmt.Fprintf(&b, "history and logs: %s\n", r.dir)
	}
	return b.String()
}

// run runs a cluster through its faults, and checks the history.
func run(ctx context.Context, o options) (*result, error) {
	var err error
	for _, path := range []*string{&o.watershed, &o.older} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return nil, err
		}
	}
	temporary := o.dir == ""
	if temporary {
		if o.dir, err = os.MkdirTemp("", "wsr"); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	c, err := startCluster(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.stop()
	for _, k := range o.kinds {
		if err := c.can(k); err != nil {
			return nil, err
		}
	}
	log.Printf("%d processes are up after %s; seed %d",
		len(c.processes), time.Since(began).Round(100*time.Millisecond), o.seed)
	w, err := newWorkload(ctx, c, o)
	if err != nil {
		return nil, err
	}
	c.workload = w
	w.start(ctx)
	o.pause(ctx, w.progress)
	faults := c.inject(ctx, o, w.progress)
	found := w.finish(ctx)
	r := &result{seed: o.seed, dir: o.dir, took: time.Since(began), counts: w.counts()}
	for kind, n := range faults {
		r.counts["faults: "+kind] = n
	}
	r.counts["processes that died by themselves"] = c.died()
	r.counts["changes of data and versions that were made"] = c.changed()
	histories := map[string]*history.History{}
	for _, x := range w.resources {
		histories[x.name] = x.history
		for _, f := range x.history.Check() {
			f.Text = x.name + ": " + f.Text
			found = append(found, f)
		}
	}
	slices.SortStableFunc(found, func(a, b history.Contradiction) int { return cmp.Compare(a.At, b.At) })
	for _, f := range found {
		begun := c.begunBefore(w.resources[0].history.Time(f.At))
		r.found = append(r.found, fmt.Sprintf("after %d faults, %s", begun, f.Text))
	}
	for _, p := range c.processes {
		// kube-controller-manager may end after a failed request, and kube-apiserver if its start takes too long
		if p.name == controllers || p.name == reference {
			continue
		}
		for _, line := range p.ends() {
			r.found = append(r.found, fmt.Sprintf("%s ended by itself: %s", p.name, line))
		}
	}
	// Readers log objects and events that differ (platform/watchcache/logreader).
	r.found = append(r.found, c.logged("Objects differ from")...)
	r.found = append(r.found, c.logged("Events differ from")...)
	for _, decision := range []string{"is refilled", "is reset", "starts a new epoch"} { // core.Term's
		r.counts["times that a log "+decision] = len(c.logged("The event log " + decision))
	}
	if n := int(w.expired.Load()); o.expired >= 0 && n > o.expired {
		r.found = append(r.found, fmt.Sprintf("%d watches expired, more than -expired %d", n, o.expired))
	}
	if len(r.found) == 0 && temporary {
		c.stop()
		return r, os.RemoveAll(o.dir)
	}
	data, err := json.Marshal(histories)
	if err == nil {
		err = os.WriteFile(filepath.Join(o.dir, "history.json"), data, 0o600)
	}
	return r, err
}
