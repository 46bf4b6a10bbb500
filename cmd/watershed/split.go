package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
)

// stores is the default number of processes of each program that is not a service.
var stores = map[string]int{"etcd": 1, "nats": 1, "xds": 1}

// split runs sets of services in processes of their own, with certificates of their own, from configuration files as in
// a deployment. It restarts processes that end. A process that ends twice in a row with the same error aborts the
// start.
func split(flags *pflag.FlagSet) func() error { return newSplitFlags(flags).run }

func (fs *splitFlags) run() error {
	began := time.Now()
	s, err := fs.newSplit()
	if err != nil {
		return err
	}
	defer s.close()
	processes, err := s.plan()
	if err != nil {
		return err
	}
	if err := s.removeOthers(processes); err != nil {
		return err
	}
	if fs.dryRun {
		for _, p := range processes {
			fmt.Printf("watershed %s\n", strings.Join(p.args, " "))
		}
		return nil
	}
	if err := s.checkPorts(); err != nil {
		return err
	}
	return s.run(processes, began)
}

// splitFlags holds the flags of the command, which include the flags of all services.
type splitFlags struct {
	*pflag.FlagSet
	directory
	placement, network string
	replicas           map[string]int
	dryRun             bool
}

// splitOnlyFlags lists the flags of services that split sets itself: differently for each process, or for its own etcd
// and NATS.
var splitOnlyFlags = []string{
	"debug-address", "health-address", "kubeconfig", "permit-port-sharing",
	"etcd-servers", "etcd-certfile", "etcd-keyfile", "etcd-cafile", "nats-url", "log-replicas",
	"log-end-dir",
}

func newSplitFlags(flags *pflag.FlagSet) *splitFlags {
	fs := &splitFlags{FlagSet: flags}
	fs.directory.addFlags(fs.FlagSet)
	fs.StringVar(&fs.placement, "placement", "split",
		`The services that share a process: "split" (none), "compact" (all but watchfanout) or "all".`)
	fs.StringToIntVar(&fs.replicas, "replicas", nil,
		"The number of processes: watchfanout=4,gateway=3; also etcd=3 and nats=3.")
	fs.StringVar(&fs.network, "rpc-network", defaultNetwork(),
		`The network between services: "unix" for sockets, or "tcp" with TLS, as between machines.`)
	fs.BoolVar(&fs.dryRun, "dry-run", false,
		"Write every process's configuration and print the commands, without running them.")
	newProcess(modules.Names()).AddFlags(fs.FlagSet, splitOnlyFlags...)
	return fs
}

// newSplit checks the flags, and opens the data directory.
func (fs *splitFlags) newSplit() (*splitRun, error) {
	sets, ok := placements[fs.placement]
	if !ok {
		return nil, fmt.Errorf("--placement %q: want any of %s", fs.placement, strings.Join(placementNames(), ", "))
	}
	counts, err := replicaCounts(sets, fs.replicas)
	if err != nil {
		return nil, err
	}
	if fs.network != defaultNetwork() && fs.network != "tcp" {
		return nil, fmt.Errorf(`--rpc-network %q: want "tcp" or, on Linux, "unix"`, fs.network)
	}
	disableAnonymous(fs.FlagSet)
	if err := errors.Join(checkFairness(fs.FlagSet), checkLogs(fs.FlagSet)); err != nil {
		return nil, err
	}
	l, err := fs.open(fs.FlagSet)
	if err != nil {
		return nil, err
	}
	if err = errors.Join(l.checkEtcdServers("split", nil), l.checkEtcdMembers(counts["etcd"])); err == nil {
		err = l.createServingCert(fs.FlagSet)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return &splitRun{
		layout:  l,
		flags:   fs.FlagSet,
		sets:    sets,
		counts:  counts,
		network: fs.network,
		spawn:   make(spawner),
		show:    &progress{w: os.Stdout},
	}, nil
}

// defaultNetwork returns the default of --rpc-network.
func defaultNetwork() string {
	if rpc.SocketsSupported {
		return "unix"
	}
	return "tcp"
}

// replicaCounts returns the number of processes of each set and of each store.
func replicaCounts(sets []set, replicas map[string]int) (map[string]int, error) {
	counts := maps.Clone(stores)
	for _, s := range sets {
		counts[s.name] = s.replicas
	}
	for name, n := range replicas {
		if _, ok := counts[name]; !ok || n < 1 || n > maxScale {
			return nil, fmt.Errorf("--replicas %s=%d: want a name (%s) and a number from 1 to %d", name, n,
				strings.Join(slices.Sorted(maps.Keys(counts)), ", "), maxScale)
		}
		if name == "nats" && n != 1 && n != 3 && n != 5 { // as --log-replicas
			return nil, fmt.Errorf("--replicas nats=%d: want 1, 3 or 5: each server has a copy of the event log", n)
		}
		counts[name] = n
	}
	return counts, nil
}

// run starts every process and restarts ended ones. It returns after a signal, or if a process is refused during the
// start.
func (s *splitRun) run(processes []*child, began time.Time) error {
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	go s.spawn.run()
	go s.pki.Renew(ctx)
	s.show.say("Watershed %s starts %d processes in %s", version.Release(), len(processes), s.dir)
	s.processes = processes
	starting, refused := context.WithCancelCause(ctx)
	defer refused(nil)
	for _, p := range processes {
		p.onRefused = func(reason error) bool {
			refused(reason)
			return !s.started.Load()
		}
		if !slices.Contains(s.lost, p.name) {
			p.start(s.spawn)
		}
	}
	defer func() {
		s.mu.Lock() // never unlocked: scaling has ended
		if s.removed != nil {
			s.processes = append(s.processes, s.removed)
		}
		for _, p := range s.processes {
			p.disableRestart()
		}
		s.stop()
	}()
	err := s.replaceMembers(starting)
	if err == nil {
		err = s.ready(starting)
	}
	if err != nil {
		s.show.failed()
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	s.started.Store(true)
	go process.ReleaseAtRest(ctx, &lifecycle.Readiness{})
	for _, p := range processes {
		if _, store := stores[p.set]; store {
			fmt.Printf("  %-14s pid %-8d %s\n", p.name, p.pid(), p.debug)
		}
	}
	fmt.Printf("Ready after %.1f s.\n\n  export KUBECONFIG=%s\n  kubectl get namespaces\n\nCtrl-C stops.\n",
		time.Since(began).Seconds(), s.pki.AdminKubeconfig())
	s.serveControl(ctx)
	return nil
}

// stop stops the processes in reverse order of their start, and the processes of a set together. Members of etcd stop
// after each other: a leader would wait for 7 s for another member to become leader, if all stopped together.
func (s *splitRun) stop() {
	for end := len(s.processes); end > 0; {
		begin := end - 1
		set := s.processes[begin].set
		for begin > 0 && s.processes[begin-1].set == set && set != "etcd" {
			begin--
		}
		var wg sync.WaitGroup
		stopped := s.show.stopping(names(s.processes[begin:end]), s.processes[begin].stopLimit())
		for _, p := range s.processes[begin:end] {
			wg.Go(p.stop)
		}
		wg.Wait()
		stopped()
		end = begin
	}
}

type splitRun struct {
	*layout
	// flags are the flags of the command line.
	flags *pflag.FlagSet
	sets  []set
	// counts holds the number of processes of each set and store.
	counts map[string]int
	// network is "unix" or "tcp": the network between services.
	network string
	spawn   spawner
	show    *progress
	// addresses lists the RPC addresses of each service's processes.
	addresses map[string][]string
	// peers lists the peer addresses of etcd's members. lost lists the names of the members to replace.
	peers, lost []string

	// started is true after the start. From then on an ended process always restarts.
	started atomic.Bool

	// scaling is held until a removed process has ended, because a new process may use the same name and files.
	scaling sync.Mutex
	mu      sync.Mutex
	// removed is the process that scaling stops. It is not in processes.
	removed   *child
	processes []*child
}

// ready waits until every process with services is ready: not only a gateway of the shared port, and not before a
// service has read its policies. It prints each process. If ctx is done first, the error is its cause.
func (s *splitRun) ready(ctx context.Context) error {
	for _, p := range s.processes {
		if _, store := stores[p.set]; store {
			continue
		}
		client := inspect.DebugClient(p.debug)
		isReady := func() error { return get(ctx, client, "http://"+p.name+"/readyz") }
		s.show.starting(p.name, func() error {
			if err := isReady(); err != nil {
				return fmt.Errorf("%w. The logs are in %s", err, s.dir)
			}
			return nil
		})
		for {
			if isReady() == nil {
				s.show.started(fmt.Sprintf("pid %-8d %s", p.pid(), p.debug))
				break
			}
			if lifecycle.Sleep(ctx, 50*time.Millisecond) != nil {
				return context.Cause(ctx)
			}
		}
	}
	return nil
}

func get(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
