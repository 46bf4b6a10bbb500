// Command envtest runs other projects' suites against kube-apiserver and against Watershed by its link called
// kube-apiserver. It fails if a spec passes with kube-apiserver only, unless known has the reason. A test that fails
// runs a second time, because the suites have short timeouts. `make envtest` runs it.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

var (
	peers = flag.String("peers", "../../.build/bin", "The directory of etcd, kubectl and kube-apiserver.")
	link  = flag.String("link", "../../bin/kube-apiserver", "The link called kube-apiserver to Watershed.")
	out   = flag.String("out", "../../.build/envtest", "The directory of the projects' copies and of the output.")
	name  = flag.String("project", "", "The projects to run, comma separated, such as kueue,lws. Empty: all.")
	both  = flag.Bool("reference", true, "Run kube-apiserver too. Otherwise each test must pass.")
	only  = flag.String("packages", "", "The packages to run, comma separated, such as client,cache. Empty: all.")
)

// states maps the names of specs to their states.
type states map[string]types.SpecState

func main() {
	flag.Parse()
	if err := compare(); err != nil {
		fmt.Fprintln(os.Stderr, "envtest:", err)
		os.Exit(1)
	}
}

// compare runs the selected packages with both servers, and prints a line for each package.
func compare() error {
	dir, err := filepath.Abs(*out)
	if err != nil {
		return err
	}
	servers := map[string]string{"kube-apiserver": filepath.Join(*peers, "kube-apiserver"), "watershed": *link}
	for server, program := range servers {
		if err := assets(filepath.Join(dir, server), *peers, program); err != nil {
			return err
		}
	}
	var failed []string
	specs, passes, ours := 0, 0, 0
	fmt.Printf("%-48s %6s %15s %10s\n", "package", "tests", "kube-apiserver", "watershed")
	for _, p := range projects {
		packages := slices.DeleteFunc(slices.Clone(p.packages), func(pkg string) bool { return !selects(*only, pkg) })
		if !selects(*name, p.name) || len(packages) == 0 {
			continue
		}
		if err := p.copyTo(filepath.Join(dir, p.name), filepath.Join(*peers, "kubectl")); err != nil {
			return err
		}
		for _, pkg := range packages {
			label := p.name + "/" + pkg
			got, err := p.run(dir, "watershed", pkg)
			reference := got.passing()
			if *both {
				var theirErr error
				reference, theirErr = p.run(dir, "kube-apiserver", pkg)
				err = errors.Join(theirErr, err)
			}
			if err != nil {
				failed = append(failed, fmt.Sprintf("%s: %v", label, err))
			} else if reference.passed() == 0 {
				failed = append(failed, label+": no test passes with kube-apiserver")
			}
			fmt.Printf("%-48s %6d %15d %10d\n", label, len(reference), reference.passed(), got.passed())
			specs, passes, ours = specs+len(reference), passes+reference.passed(), ours+got.passed()
			for test, state := range reference {
				if state != types.SpecStatePassed || got[test] == types.SpecStatePassed {
					continue
				}
				if reason := known[label+": "+test]; reason != "" {
					fmt.Printf("  known: %s: %s\n", test, reason)
				} else {
					failed = append(failed, fmt.Sprintf("%s: %s: %v", label, test, got[test]))
				}
			}
		}
	}
	fmt.Printf("%-48s %6d %15d %10d\n", "all", specs, passes, ours)
	if len(failed) > 0 {
		slices.Sort(failed)
		return fmt.Errorf("%d failures, whose output is in %s:\n  %s", len(failed), dir, strings.Join(failed, "\n  "))
	}
	if specs == 0 {
		return errors.New("no package has these names")
	}
	return nil
}

// selects returns true if a list of names, comma separated, is empty or has the name.
func selects(list, name string) bool {
	return list == "" || slices.Contains(strings.Split(list, ","), name)
}

func (s states) passed() (n int) {
	for _, state := range s {
		if state == types.SpecStatePassed {
			n++
		}
	}
	return n
}

// passing returns s with a pass for each spec that was not skipped.
func (s states) passing() states {
	all := maps.Clone(s)
	for test, state := range all {
		if !state.Is(types.SpecStateSkipped | types.SpecStatePending) {
			all[test] = types.SpecStatePassed
		}
	}
	return all
}

// assets replaces dir with a directory as KUBEBUILDER_ASSETS names it.
func assets(dir, peers, server string) error {
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
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

// run runs the tests of a package in the project's copy, and keeps their output beside the server's assets. It returns
// the states of its Go tests and of the specs of its suite. Specs with equal names have numbers.
func (p project) run(dir, server, pkg string) (states, error) {
	assets := filepath.Join(dir, server)
	record := filepath.Join(assets, p.name+"-"+strings.ReplaceAll(pkg, "/", "-"))
	args := []string{"test", "-json", "-count=1", "-timeout=20m", "./" + filepath.Join(p.root, pkg)}
	if p.ginkgo {
		args = append(args, "-ginkgo.json-report="+record+".json", "-ginkgo.flake-attempts=2")
	}
	var events []byte
	var failure error
	test := func(args []string) {
		cmd := exec.Command("go", args...)
		cmd.Dir = filepath.Join(dir, p.name)
		cmd.Env = append(os.Environ(), "KUBEBUILDER_ASSETS="+assets, "KUBEBUILDER_CONTROLPLANE_START_TIMEOUT=2m",
			"KUBEBUILDER_CONTROLPLANE_STOP_TIMEOUT=2m")
		events, failure = cmd.CombinedOutput()
	}
	for range 2 { // the tests use ports of the system's choice, which a connection may take before they listen
		if test(args); !bytes.Contains(events, []byte("address already in use")) {
			break
		}
	}
	all, text := goTests(events)
	if again := all.failedTests(); !p.ginkgo && len(again) > 0 {
		fmt.Printf("  these tests have failed with %s, and run a second time: %s\n", server, strings.Join(again, " "))
		test(append(args, "-run=^("+strings.Join(again, "|")+")$"))
		second, more := goTests(events)
		maps.Copy(all, second)
		text = append(text, more...)
	}
	if err := os.WriteFile(record+".log", text, 0o600); err != nil {
		return nil, err
	}
	if !p.ginkgo {
		if len(all) == 0 {
			return nil, errors.Join(errors.New("no test runs with "+server), failure)
		}
		return all, nil
	}
	data, err := os.ReadFile(record + ".json")
	if err != nil {
		return nil, errors.Join(errors.New("no report with "+server), failure, err)
	}
	var suites []types.Report
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("%s.json: %w", record, err)
	}
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			if spec.LeafNodeType != types.NodeTypeIt || spec.State == types.SpecStatePending {
				continue
			}
			test := spec.FullText()
			for n := 2; all[test] != 0; n++ {
				test = fmt.Sprintf("%s (%d)", spec.FullText(), n)
			}
			all[test] = spec.State
			if spec.NumAttempts > 1 {
				fmt.Printf("  this spec has failed with %s, and ran a second time: %s\n", server, test)
			}
		}
	}
	return all, nil
}

// failedTests returns the Go tests that failed, without subtests.
func (s states) failedTests() (names []string) {
	for test, state := range s {
		name, isTest := strings.CutPrefix(test, "go test ")
		if isTest && state == types.SpecStateFailed && !strings.Contains(name, "/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// goTests returns the states of the tests in the events of go test -json, and the text of the events.
func goTests(events []byte) (states, []byte) {
	all, text := states{}, []byte{}
	for line := range bytes.Lines(events) {
		var event struct{ Action, Test, Output string }
		if json.Unmarshal(line, &event) != nil {
			text = append(text, line...)
			continue
		}
		text = append(text, event.Output...)
		if event.Test == "" {
			continue
		}
		switch event.Action {
		case "pass":
			all["go test "+event.Test] = types.SpecStatePassed
		case "fail":
			all["go test "+event.Test] = types.SpecStateFailed
		}
	}
	return all, text
}
