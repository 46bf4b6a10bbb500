// Command differential sends the same requests to kube-apiserver and to Watershed, both on fresh stores, and compares
// the responses. It compares status, relevant headers and body, and masks the values that differ between any two
// servers. Every difference is a finding, unless known.go accepts it with a reason.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// options control the amount and the kind of requests.
type options struct {
	seed        uint64
	steps, fuzz int
	form, out   string
	phases      string
	axes        string
}

// A run with all phases, or with all axes, contains every difference of known.go, if it has at least shortSteps random
// requests.
const (
	allPhases  = "discovery,create,verbs,paths,definitions,fixtures,fuzz,walk,remove"
	allAxes    = "authn,authz,admission,audit"
	shortSteps = 1500
)

func main() {
	testing.Init()
	o := options{}
	flag.Uint64Var(&o.seed, "seed", 1, "Seed of the fuzzed objects and the random walk.")
	flag.IntVar(&o.steps, "steps", 20000, "Requests of the random walk.")
	flag.IntVar(&o.fuzz, "fuzz", 40, "Rounds of fuzzed objects, about 80 requests each.")
	flag.StringVar(&o.form, "form", "up", "up, split or compact.")
	flag.StringVar(&o.out, "out", filepath.Join(harness.Root(), ".build", "differential"),
		"The directory of differences.txt.")
	flag.StringVar(&o.phases, "phases", allPhases,
		"Comma-separated phases to run. Most of them send requests for the objects that create creates.")
	flag.StringVar(&o.axes, "axes", allAxes, "Comma-separated axes of configuration.")
	flag.Parse()
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{
		Name: "differential",
		F:    func(t *testing.T) { run(t, o) },
	}, {
		Name: "configurations",
		F:    func(t *testing.T) { configurations(t, o) },
	}}, nil, nil)
}

// configurations compares servers with many configurations and checks the report.
func configurations(t *testing.T, o options) {
	all := newReport(knownByConfiguration)
	byName := map[string]func(*axes){"authn": (*axes).authenticators, "authz": (*axes).authorizers,
		"admission": (*axes).plugins, "audit": (*axes).audits}
	names := strings.Split(o.axes, ",")
	for _, name := range names {
		if byName[name] == nil {
			t.Fatalf("there is no axis %q", name)
		}
	}
	t.Run("axes", func(t *testing.T) { // it ends after the parallel configurations
		for _, name := range names {
			byName[name](&axes{t: t, report: all})
		}
	})
	all.known = slices.Concat(knownByConfiguration, knownOfAudit)
	all.write(filepath.Join(o.out, "configurations"))
	all.check(t, o.axes == allAxes)
}

// run runs the selected phases and checks the report.
func run(t *testing.T, o options) {
	theirs := harness.Oracle(t)
	var ours *harness.Server
	switch o.form {
	case "up":
		ours = harness.Up(t, "")
	case "split":
		ours = harness.Split(t, "")
	case "compact":
		ours = harness.Compact(t, "")
	default:
		t.Fatalf("-form %s: want up, split or compact", o.form)
	}
	p := &pair{
		t:      t,
		theirs: newSide(t, "kube-apiserver", theirs),
		ours:   newSide(t, "watershed", ours),
		report: newReport(known),

		follows: true,
	}
	rng := rand.New(rand.NewPCG(o.seed, 1))
	phase := func(name string, f func()) {
		if strings.Contains(o.phases, name) {
			p.report.begin(name)
			f()
		}
	}
	p.report.begin("discovery")
	d := p.discover()
	all := d.valid()
	phase("create", func() {
		p.create(all)
		for _, s := range []*harness.Server{theirs, ours} {
			withoutRepairs(t, s)
		}
	})
	phase("verbs", func() { p.verbs(all) })
	phase("paths", p.paths)
	phase("definitions", p.definitions)
	phase("fixtures", func() { p.fixtures(d, fixturesDir(t)) })
	phase("fuzz", func() { p.fuzz(all, o.fuzz, rng) })
	phase("walk", func() { p.walk(all, o.steps, rng) })
	phase("remove", func() { p.remove(all) })
	phase("discovery", func() {
		p.untilGone("/apis", "diff.example.com") // a CRD's finalizer takes some time
		p.discover()
	})
	fmt.Printf("seed %d, %s\n", o.seed, o.form)
	p.report.write(o.out)
	p.report.check(t, o.phases == allPhases && o.steps >= shortSteps)
}

// check fails the test on any finding. After a complete run it also fails on an accepted difference that the run lacks.
func (p *report) check(t testing.TB, complete bool) {
	if n := len(p.unexplained); n > 0 {
		t.Errorf("%d answers differ", n)
	}
	if missing := p.missing(); complete && len(missing) > 0 {
		t.Errorf("known.go accepts differences that no longer occur: %q", missing)
	}
}

// withoutRepairs deletes the Events of a server's repair controllers about the corpus's services. These controllers
// race with the services' creation, in kube-apiserver too, and may see an unallocated address on one side only.
func withoutRepairs(t testing.TB, s *harness.Server) {
	events := s.Client().CoreV1().Events(metav1.NamespaceAll)
	all, err := events.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all.Items {
		if repairEvent.MatchString(`"` + e.ReportingController + `"`) {
			if err := s.Client().CoreV1().Events(e.Namespace).Delete(t.Context(), e.Name,
				metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// withoutEvents deletes the Events of a server's start.
func withoutEvents(t testing.TB, s *harness.Server) {
	if err := s.Client().CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
}

// fixturesDir returns the directory of the test data of k8s.io/api's own tests.
func fixturesDir(t testing.TB) string {
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/api")
	cmd.Dir = filepath.Join(harness.Root(), "test")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "testdata", "HEAD")
}
