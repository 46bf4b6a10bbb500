// Command bench measures Watershed and kube-apiserver with the same work in alternation, each with a fresh etcd of
// equal settings. CPU is the servers' user and system time, without the client's and etcd's. For Watershed it is the
// sum over all processes and NATS. The command prints a table, and writes it to docs/benchmarks/performance.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

var (
	bin       = flag.String("bin", ".build/bin", "The directory of kube-apiserver and etcd.")
	watershed = flag.String("watershed", "bin/watershed", "The binary under test.")
	baseline  = flag.String("baseline", "",
		"Another binary to measure beside the binary under test, to show the effect of a change.")
	pods   = flag.Int("pods", 10000, "The number of pods in the lists.")
	rounds = flag.Int("rounds", 3, "The number of rounds; the table has the medians.")
	out    = flag.String("out", "../docs/benchmarks/performance.md", "The page whose table is replaced.")
	only   = flag.String("only", "", "Servers to measure, comma separated; all by default.")
	grow   = flag.Bool("growth", false,
		"Measure instead how the cost of a delivery grows with watchers, and memory with objects; plots go to "+
			"docs/benchmarks/performance/.")
	weigh = flag.Bool("footprint", false,
		"Measure instead the memory of fresh servers with pods, ConfigMaps, custom resources, watches and CRDs; "+
			"replaces the page's table of memory.")
	crds = flag.String("crds", "",
		"The directory of the CRDs of -footprint. -footprint without -rows requires it.")
	scaled = flag.Bool("replicas", false,
		"Measure instead the cost of a write with 1 to 4 registries, and of a delivery with 1 to 8 watchfanout "+
			"replicas; plots go to docs/benchmarks/performance/.")
	failovers = flag.Int("failover", 0,
		"Measure instead how old events become when the leader of the event log is killed so many times.")
	failoverStops = flag.Bool("failover-stops", false, "With -failover, stop the leader by SIGTERM instead of SIGKILL.")
	costs         = flag.String("coefficients", "",
		"Measure instead the costs that `watershed capacity` adds up, and write them to this file.")
	nodes = flag.Int("cluster", 0,
		"Measure instead the load of a cluster of so many nodes; replaces the table of docs/benchmarks/cluster-load.md.")
	watchesPerNode = flag.Int("watches-per-node", 18, "The watches of each node of -cluster.")
	atRest         = flag.Duration("at-rest", time.Minute, "How long the cluster of -cluster is measured at rest.")
	burnerRate     = flag.Int("kube-burner", 0,
		"Measure instead kube-burner's api-intensive and crd-scale, with so many requests a second of each job; "+
			"replaces the table of docs/benchmarks/kube-burner.md.")
	with = flag.String("with", "",
		"Flags that kube-apiserver and Watershed get beside their own, separated by spaces; "+
			"{server} in one stands for each one's name.")
	page = flag.Bool("page", false, "Rewrite the page even if only a part was measured.")
	rows = flag.String("rows", "",
		"Measure only work whose name has one of these in it, comma separated; the page is then left alone.")
)

const (
	// restTime is the time at rest before memory is measured: two periods of platform/process.
	restTime = 130 * time.Second
	// peers is a part of the tables' headings.
	peers = "kube-apiserver 1.36.3 with default flags; each with an etcd 3.6 of its own, over TLS."
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if run := children[flag.Arg(0)]; run != nil {
		runChild(run, flag.Args()[1:])
		return
	}
	dir, err := os.MkdirTemp("", "wsbench")
	check(err)
	defer os.RemoveAll(dir)
	if *grow {
		growth(dir)
		return
	}
	if *weigh {
		footprint(dir, *crds)
		return
	}
	if *scaled {
		scale(dir)
		return
	}
	if *nodes > 0 {
		if *nodes < clusterNamespaces*clusterDeployments {
			log.Fatalf("-cluster=%d: want at least a node for each of %d Deployments", *nodes,
				clusterNamespaces*clusterDeployments)
		}
		clusterLoad(dir)
		return
	}
	if *burnerRate > 0 {
		kubeBurner(dir)
		return
	}
	if *costs != "" {
		measureCoefficients(dir, *costs)
		return
	}
	if *failovers > 0 {
		failover(dir, *failovers, *failoverStops)
		return
	}
	var servers []*server
	for _, k := range selected() {
		s, _ := k.startIn(dir)
		defer s.stop()
		servers = append(servers, s)
	}
	var names []string
	for _, s := range servers {
		names = append(names, s.name)
	}
	results := newMeasured(names)
	for _, s := range servers {
		results.record(rowIdle, s.name, s.memory(), nil)
		prepare(s)
		s.fill(*pods)
	}
	wanted := slices.DeleteFunc(slices.Clone(work), func(w piece) bool { return !isWanted(w.name) })
	for round := range *rounds {
		for i, w := range wanted {
			log.Printf("round %d of %d, %d of %d: %s", round+1, *rounds, i+1, len(wanted), w.name)
			for _, s := range servers {
				settle(servers)
				s.begin()
				values := w.do(s)
				used := s.usage()
				for name := range used {
					used[name] -= s.before[name]
				}
				if cpuRows(values) > 1 {
					used = nil // the processes' shares of each row are unknown
				}
				for row, v := range values {
					results.record(row, s.name, v, used)
				}
			}
		}
	}
	for _, s := range servers {
		results.record(rowServed, s.name, s.memory(), nil)
	}
	log.Print("two minutes at rest")
	time.Sleep(restTime)
	for _, s := range servers {
		results.record(rowAtRest, s.name, s.memory(), nil)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, s := range servers {
		if ready, _ := openWatches(ctx, s, watchesAtRest, everything); !ready {
			log.Fatalf("%s: the watches do not open", s.name)
		}
	}
	log.Print("two minutes with watches")
	time.Sleep(restTime)
	for _, s := range servers {
		results.record(rowWatched, s.name, s.memory(), nil)
	}
	table := results.markdown(fmt.Sprintf(
		"%s, %d pods, medians of %d rounds with the least and the most. %s", machine(), *pods, *rounds, peers))
	fmt.Println(table)
	if *rows == "" && *only == "" || *page {
		check(publish(results, table))
	}
}

// isWanted reports whether -rows selects a row.
func isWanted(row string) bool {
	return slices.ContainsFunc(strings.Split(*rows, ","), func(r string) bool { return strings.Contains(row, r) })
}

// settle waits until the servers have ended the work of the row before, for at most half a minute. A server that still
// answers a storm, or collects its garbage, would delay the next server's requests. Its log has the servers that do not
// come to rest.
func settle(servers []*server) {
	const atRest = 0.1 // processors of a server
	busy := servers
	for range 15 {
		before := map[*server]float64{}
		for _, s := range servers {
			before[s] = s.cpu()
		}
		time.Sleep(2 * time.Second) // the period of the measurement
		busy = slices.DeleteFunc(slices.Clone(servers), func(s *server) bool { return s.cpu()-before[s] < 2*atRest })
		if len(busy) == 0 {
			return
		}
	}
	for _, s := range busy {
		log.Printf("%s does not come to rest", s.name)
	}
}

// kind is a kind of server to measure. of is its name in -only.
type kind struct {
	of, name string
	start    func(dir string) *server
}

// startIn starts a server in a directory of its own below dir, which it returns.
func (k kind) startIn(dir string) (*server, string) {
	own := filepath.Join(dir, strings.ReplaceAll(k.name, " ", "-"))
	check(os.MkdirAll(own, 0o700))
	return k.start(own), own
}

// kinds returns all kinds, in the order of the table's columns.
func kinds() []kind {
	all := []kind{{"kube-apiserver", "kube-apiserver", startReference}}
	binaries := []struct{ suffix, path string }{{"", *watershed}}
	if *baseline != "" {
		binaries = []struct{ suffix, path string }{{" before", *baseline}, {"", *watershed}}
	}
	for _, of := range []struct {
		name  string
		start func(dir, name, binary string) *server
	}{{"up", startUp}, {"split", startSplit("split")}, {"compact", startSplit("compact")}} {
		for _, b := range binaries {
			name := of.name + b.suffix
			all = append(all, kind{of.name, name, func(dir string) *server { return of.start(dir, name, b.path) }})
		}
	}
	return all
}

// selected returns the kinds of -only, all by default.
func selected() []kind {
	return slices.DeleteFunc(kinds(), func(k kind) bool {
		return *only != "" && !slices.Contains(strings.Split(*only, ","), k.of)
	})
}

const (
	rowIdle   = "memory when idle (MB)"
	rowServed = "memory with the pods served (MB)"
	rowAtRest = "memory with the pods served, after two minutes at rest (MB)"
	// rowWatched is rowAtRest with watchesAtRest watches.
	rowWatched    = "memory with the pods served, at rest with 1000 watches (MB)"
	watchesAtRest = 1000
)

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
