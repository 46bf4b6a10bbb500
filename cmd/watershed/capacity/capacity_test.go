package capacity

import (
	"bytes"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// parsed returns the flags of a command line.
func parsed(t *testing.T, args ...string) *Flags {
	t.Helper()
	f, fs := &Flags{}, pflag.NewFlagSet("capacity", pflag.ContinueOnError)
	f.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestMeasuredIsComplete checks that measured.json has each cost that the model reads.
func TestMeasuredIsComplete(t *testing.T) {
	m, err := measured()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{Lease, ConfigMap, Pod, DeliverShared, DeliverOwn, List} {
		if m.CPU[name]["gateway"] <= 0 || m.CPU[name]["watchfanout"] <= 0 && name != DeliverShared {
			t.Errorf("no cost of %q", name)
		}
	}
	for _, name := range []string{Pod76, ConfigMap1} {
		if m.Object[name]["watchfanout"] <= 0 {
			t.Errorf("no memory of %q", name)
		}
	}
	for _, name := range []string{Shared, Own} {
		if m.Watch[name]["gateway"] <= 0 {
			t.Errorf("no memory of a watch %q", name)
		}
	}
	for _, name := range services {
		if m.Process[name] <= 0 {
			t.Errorf("no memory of a process of %s", name)
		}
	}
	if m.Publisher <= 0 {
		t.Error("no cost of publishing an event")
	}
}

// TestPageHasTheOutput checks that docs/operators/capacity.md shows the output of its commands.
func TestPageHasTheOutput(t *testing.T) {
	page, err := os.ReadFile("../../../docs/operators/capacity.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := 0
	for block := range strings.SplitSeq(string(page), "```") {
		command, output, ok := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(block, "text"), "\n"), "\n")
		args, isCommand := strings.CutPrefix(command, "$ watershed capacity ")
		if !ok || !isCommand {
			continue
		}
		shown++
		var out bytes.Buffer
		if err := parsed(t, strings.Fields(args)...).run(&out); err != nil {
			t.Fatal(err)
		}
		if out.String() != output {
			t.Errorf("`watershed capacity %s` prints\n%s", args, out.String())
		}
	}
	if shown == 0 {
		t.Error("the page has no command")
	}
}

// TestMoreNodesNeedMore checks that no need shrinks with nodes, and that the largest load fits.
func TestMoreNodesNeedMore(t *testing.T) {
	m, err := measured()
	if err != nil {
		t.Fatal(err)
	}
	var last *Plan
	for _, nodes := range []string{"1", "100", "5000", "130000", "1000000"} {
		f := parsed(t, "--nodes="+nodes)
		if err := f.validate(); err != nil {
			t.Fatal(err)
		}
		p := Compute(f.Load, f.Limits, m)
		for i, s := range p.Services {
			if math.IsNaN(s.Cores) || math.IsInf(s.Cores, 0) || s.Processes < fewest {
				t.Errorf("%s nodes: %+v", nodes, s)
			}
			if last != nil && (s.Cores < last.Services[i].Cores || s.Processes < last.Services[i].Processes) {
				t.Errorf("%s nodes: %+v, and fewer nodes need %+v", nodes, s, last.Services[i])
			}
		}
		largest, beyond := Largest(f.Load, f.Limits, m)
		fits := Compute(f.times(float64(largest)/float64(f.Nodes)), f.Limits, m)
		if fits.Walls[0].Use > 1.02 || beyond.Walls[0].Use <= 1 {
			t.Errorf("%s nodes: %d nodes fit by %v, and the next do not by %v", nodes, largest, fits.Walls[0],
				beyond.Walls[0])
		}
		last = p
	}
}

// TestAResourceHasTwoReplicas checks the limit of the two replicas that serve a resource: only larger machines move it.
// The replicas of other resources are added beside them.
func TestAResourceHasTwoReplicas(t *testing.T) {
	m, err := measured()
	if err != nil {
		t.Fatal(err)
	}
	plan := func(args string) (*Plan, Service) {
		f := parsed(t, strings.Fields(args)...)
		if err := f.validate(); err != nil {
			t.Fatal(err)
		}
		p := Compute(f.Load, f.Limits, m)
		return p, p.Services[slices.Index(services, tier)]
	}
	const wall = "the two watchfanout replicas of a resource"
	p, s := plan("--nodes=5000 --informers=1000")
	if w := p.Walls[0]; w.Name != wall || w.Use < 2 || !strings.Contains(w.Remedy, "larger machines") {
		t.Errorf("the first limit is %+v", w)
	}
	if _, twice := plan("--nodes=5000 --informers=2000"); twice.Processes != s.Processes {
		t.Errorf("%d replicas instead of %d, which do not serve pods", twice.Processes, s.Processes)
	}
	if p, _ := plan("--nodes=5000 --informers=1000 --cores=64"); p.Walls[0].Use > 1 {
		t.Errorf("larger machines do not help: %+v", p.Walls[0])
	}
	if p, _ := plan("--nodes=5000"); p.Walls[slices.IndexFunc(p.Walls, named(wall))].Use > 0.2 {
		t.Errorf("a usual load does not fit: %+v", p.Walls)
	}
	// Watches of Secrets and other resources spread over further replicas, each of which has a part of the objects.
	const others = "--nodes=5000 --small-objects-per-node=1000 --own-watches-per-node="
	_, two := plan(others + "10")
	_, more := plan(others + "6000")
	if two.Processes != 2 || two.TotalGigabytes != 2*two.Gigabytes {
		t.Errorf("both replicas have all objects, not %+v", two)
	}
	objects := func(s Service) float64 { return s.TotalGigabytes - m.Process[tier]/1e3*float64(s.Processes) }
	watches := 5990 * 5000 * m.Watch[Own][tier] / 1e6
	if more.Processes < 4 || math.Abs(objects(more)-objects(two)-watches) > 1e-6 {
		t.Errorf("%+v: two replicas have an object, as in %+v", more, two)
	}
}

func named(name string) func(Wall) bool { return func(w Wall) bool { return w.Name == name } }

// TestBadFlags checks that a bad value is a line with the flag and the value.
func TestBadFlags(t *testing.T) {
	for args, want := range map[string]string{
		"":                                 "--nodes 0: want 1 to 10000000",
		"--nodes=-1":                       "--nodes -1: want 1 to 10000000",
		"--nodes=99999999":                 "--nodes 99999999: want 1 to 10000000",
		"--nodes=1 --cores=NaN":            "--cores NaN: want 1 to 10000000",
		"--nodes=1 --cores=0":              "--cores 0: want 1 to 10000000",
		"--nodes=1 --lease-period=0s":      "--lease-period 0s, --status-period 5m0s: want at least 1s",
		"--nodes=1 --pods-per-node=-3":     "--pods-per-node -3: want 0 to 10000000",
		"--nodes=1 --pods-per-second=+Inf": "--pods-per-second +Inf: want 0 to 10000000",
		"--nodes=1 --output=xml":           `--output "xml": want "text" or "json"`,
	} {
		if err := parsed(t, strings.Fields(args)...).run(&bytes.Buffer{}); err == nil || err.Error() != want {
			t.Errorf("%q: %v, not %s", args, err, want)
		}
	}
}
