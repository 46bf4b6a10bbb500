// Command envtest runs controller-runtime's own suites against kube-apiserver and against Watershed by its link called
// kube-apiserver. It fails if a spec passes with kube-apiserver only. `make envtest` runs it.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// packages are the packages of controller-runtime whose suites start a control plane.
var packages = []string{
	"builder", "cache", "client", "client/apiutil", "cluster", "controller", "controller/controllerutil", "envtest",
	"handler", "internal/controller", "internal/recorder", "internal/testing/controlplane",
	"manager", "manager/internal/integration", "metrics/filters", "reconcile", "source",
	"webhook",
}

const module = "sigs.k8s.io/controller-runtime/pkg/"

// states maps the names of specs to their states.
type states map[string]types.SpecState

func main() {
	peers := flag.String("peers", "../../.build/bin", "The directory of etcd, kubectl and kube-apiserver.")
	link := flag.String("link", "../../bin/kube-apiserver", "The link called kube-apiserver to Watershed.")
	only := flag.String("packages", "", "The packages to run, comma separated, such as client,cache. Empty: all.")
	flag.Parse()
	selected := packages
	if *only != "" {
		selected = strings.Split(*only, ",")
	}
	if err := compare(*peers, *link, selected); err != nil {
		fmt.Fprintln(os.Stderr, "envtest:", err)
		os.Exit(1)
	}
}

// compare runs the packages with both servers, and prints a line for each package.
func compare(peers, link string, packages []string) error {
	dir, err := os.MkdirTemp("", "envtest")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	servers := map[string]string{"kube-apiserver": filepath.Join(peers, "kube-apiserver"), "watershed": link}
	for name, server := range servers {
		if err := assets(filepath.Join(dir, name), peers, server); err != nil {
			return err
		}
	}
	var failed []string
	specs, passes, ours := 0, 0, 0
	fmt.Printf("%-32s %6s %15s %10s\n", "package", "tests", "kube-apiserver", "watershed")
	for _, p := range packages {
		reference, err := run(filepath.Join(dir, "kube-apiserver"), p)
		if err != nil {
			return err
		}
		got, err := run(filepath.Join(dir, "watershed"), p)
		if err != nil {
			return err
		}
		for name, state := range reference {
			if state == types.SpecStatePassed && got[name] != types.SpecStatePassed {
				failed = append(failed, fmt.Sprintf("%s: %s: %v", p, name, got[name]))
			}
		}
		fmt.Printf("%-32s %6d %15d %10d\n", p, len(reference), reference.passed(), got.passed())
		specs, passes, ours = specs+len(reference), passes+reference.passed(), ours+got.passed()
	}
	fmt.Printf("%-32s %6d %15d %10d\n", "all", specs, passes, ours)
	if len(failed) > 0 {
		slices.Sort(failed)
		return errors.New("only kube-apiserver passes:\n  " + strings.Join(failed, "\n  "))
	}
	return nil
}

func (s states) passed() (n int) {
	for _, state := range s {
		if state == types.SpecStatePassed {
			n++
		}
	}
	return n
}

// assets creates a directory as KUBEBUILDER_ASSETS names it.
func assets(dir, peers, server string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for name, program := range map[string]string{
		"etcd":           filepath.Join(peers, "etcd"),
		"kubectl":        filepath.Join(peers, "kubectl"),
		"kube-apiserver": server,
	} {
		path, err := filepath.Abs(program)
		if err != nil {
			return err
		}
		if _, err := os.Stat(path); err != nil {
			return err
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// run runs the tests of a package, and returns the states of its Go tests and of the specs of its suite. Specs with
// equal names have numbers.
func run(assets, pkg string) (states, error) {
	report := filepath.Join(assets, strings.ReplaceAll(pkg, "/", "-")+".json")
	cmd := exec.Command("go", "test", "-json", "-count=1", "-timeout=20m", module+pkg, "-ginkgo.json-report="+report)
	cmd.Env = append(os.Environ(), "KUBEBUILDER_ASSETS="+assets)
	out, failure := cmd.CombinedOutput()
	data, err := os.ReadFile(report)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", pkg, errors.Join(failure, err), out)
	}
	var suites []types.Report
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", report, err)
	}
	all := goTests(out)
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			if spec.LeafNodeType != types.NodeTypeIt || spec.State == types.SpecStatePending {
				continue
			}
			name := spec.FullText()
			for n := 2; all[name] != 0; n++ {
				name = fmt.Sprintf("%s (%d)", spec.FullText(), n)
			}
			all[name] = spec.State
		}
	}
	return all, nil
}

// goTests returns the states of the tests in the output of go test -json.
func goTests(out []byte) states {
	all := states{}
	for line := range bytes.Lines(out) {
		var event struct{ Action, Test string }
		if json.Unmarshal(line, &event) != nil || event.Test == "" {
			continue
		}
		switch event.Action {
		case "pass":
			all["go test "+event.Test] = types.SpecStatePassed
		case "fail":
			all["go test "+event.Test] = types.SpecStateFailed
		}
	}
	return all
}
