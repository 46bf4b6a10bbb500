package capacity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/watershed/inspect"
)

// maxNodes bounds --nodes. No cluster is as large, and all products of it are exact.
const maxNodes = 10_000_000

// Flags are the flags of the command.
type Flags struct {
	Load
	Limits
	Output inspect.Output
}

// AddFlags adds every flag to fs.
func (f *Flags) AddFlags(fs *pflag.FlagSet) {
	fs.IntVar(&f.Nodes, "nodes", 0, "The number of nodes.")
	fs.IntVar(&f.PodsPerNode, "pods-per-node", 30, "The number of pods of a node.")
	fs.Float64Var(&f.PodsPerSecond, "pods-per-second", 0,
		"How many pods are created, and how many deleted, in a second. 0: a fiftieth of the nodes.")
	fs.IntVar(&f.SharedWatches, "shared-watches-per-node", 8,
		"Watches of a node that every other node has too, such as of all Services.")
	fs.IntVar(&f.OwnWatches, "own-watches-per-node", 10, "Watches of a node alone, such as of a Secret.")
	fs.Float64Var(&f.SharedEvents, "shared-events-per-second", 0,
		"Events that every node receives in a second, such as of EndpointSlices. 0: a tenth of the pods a second.")
	fs.IntVar(&f.Informers, "informers", 10, "Clients that watch all pods and all nodes.")
	fs.IntVar(&f.SmallObjects, "small-objects-per-node", 10, "Objects of 1 KB that a node adds, such as ConfigMaps.")
	fs.DurationVar(&f.LeasePeriod, "lease-period", 10*time.Second, "How often a kubelet renews its Lease.")
	fs.DurationVar(&f.StatusPeriod, "status-period", 5*time.Minute, "How often a kubelet reports the node's status.")
	fs.Float64Var(&f.ListMegabytes, "list-megabytes-per-second", 10, "Lists that clients read in a second.")
	fs.Float64Var(&f.Cores, "cores", 8, "The processor cores of a machine. A process uses 60 % of them.")
	fs.Float64Var(&f.Gigabytes, "memory-gigabytes", 64, "The memory of a machine.")
	fs.Float64Var(&f.EtcdWrites, "etcd-writes-per-second", 10_000, "How many writes a second an etcd accepts.")
	fs.Float64Var(&f.EtcdGigabytes, "etcd-gigabytes", 8, "The quota of an etcd.")
	fs.Float64Var(&f.NATSMegabytes, "nats-megabytes-per-second", 1_000, "How much a NATS server sends in a second.")
	f.Output.AddFlag(fs)
}

// Command prints the processes that a cluster needs.
func Command(fs *pflag.FlagSet) func() error {
	f := &Flags{}
	f.AddFlags(fs)
	return func() error { return f.run(os.Stdout) }
}

// validate returns an error that names a flag with a bad value, and sets the defaults that depend on others.
func (f *Flags) validate() error {
	if f.Nodes < 1 || f.Nodes > maxNodes {
		return fmt.Errorf("--nodes %d: want 1 to %d", f.Nodes, maxNodes)
	}
	for _, n := range []struct {
		name  string
		value float64
		least float64
	}{
		{"pods-per-node", float64(f.PodsPerNode), 0},
		{"pods-per-second", f.PodsPerSecond, 0},
		{"shared-watches-per-node", float64(f.SharedWatches), 0},
		{"own-watches-per-node", float64(f.OwnWatches), 0},
		{"shared-events-per-second", f.SharedEvents, 0},
		{"informers", float64(f.Informers), 0},
		{"small-objects-per-node", float64(f.SmallObjects), 0},
		{"list-megabytes-per-second", f.ListMegabytes, 0},
		{"cores", f.Cores, 1},
		{"memory-gigabytes", f.Gigabytes, 1},
		{"etcd-writes-per-second", f.EtcdWrites, 1},
		{"etcd-gigabytes", f.EtcdGigabytes, 1},
		{"nats-megabytes-per-second", f.NATSMegabytes, 1},
	} {
		if !(n.value >= n.least && n.value <= maxNodes) { // not a number is not in the range
			return fmt.Errorf("--%s %v: want %v to %d", n.name, n.value, n.least, int(maxNodes))
		}
	}
	if f.LeasePeriod < time.Second || f.StatusPeriod < time.Second {
		return fmt.Errorf("--lease-period %s, --status-period %s: want at least 1s", f.LeasePeriod, f.StatusPeriod)
	}
	if f.PodsPerSecond == 0 {
		f.PodsPerSecond = float64(f.Nodes) / 50
	}
	if f.SharedEvents == 0 {
		f.SharedEvents = f.PodsPerSecond / 10
	}
	return f.Output.Validate()
}

func (f *Flags) run(w io.Writer) error {
	if err := f.validate(); err != nil {
		return err
	}
	m, err := measured()
	if err != nil {
		return errors.New("measured.json: " + err.Error())
	}
	p := Compute(f.Load, f.Limits, m)
	if f.Output.IsJSON() {
		return json.NewEncoder(w).Encode(p)
	}
	nodes, beyond := Largest(f.Load, f.Limits, m)
	return p.print(w, m, nodes, beyond)
}

// print writes the plan as text, with the largest load that fits and the plan beyond it.
func (p *Plan) print(w io.Writer, m *Measured, largest int, beyond *Plan) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s nodes, %s pods, %s objects, %s watches\n", whole(p.Nodes), whole(p.Pods), whole(p.Objects),
		whole(p.Watches))
	fmt.Fprintf(t, "%s writes and %s deliveries a second\n\n", whole(p.Writes), whole(p.Deliveries))
	fmt.Fprintln(t, "service\tprocesses\tcores\tGB each")
	cores, gigabytes := 0.0, 0.0
	for _, s := range p.Services {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f\n", s.Name, s.Processes, s.Cores, s.Gigabytes)
		cores += s.Cores
		gigabytes += s.TotalGigabytes
	}
	fmt.Fprintf(t, "all\t\t%.1f\t%.1f in all\n\nlimit\tuse\n", cores, gigabytes)
	for i, wall := range p.Walls {
		if i >= 5 && wall.Use <= 1 {
			break
		}
		fmt.Fprintf(t, "%s\t%.0f %%\n", wall.Name, wall.Use*100)
	}
	verdict := "The load fits"
	if p.Walls[0].Use > 1 {
		verdict = "The load does not fit"
	}
	wall := beyond.Walls[0]
	fmt.Fprintf(t, "\n%s. %s nodes of this kind fit. The next limit: %s. Remedy: %s.\n", verdict, whole(largest),
		wall.Name, wall.Remedy)
	fmt.Fprintf(t, "Costs measured on %s, %d processors, %s. etcd is not in the cores.\n", m.Date, m.Processors, m.Go)
	return t.Flush()
}

// whole formats a number with three significant digits and separators.
func whole[N int | float64](n N) string {
	v := float64(n)
	if v >= 1000 {
		unit := math.Pow(10, math.Floor(math.Log10(v))-2)
		v = math.Round(v/unit) * unit
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
