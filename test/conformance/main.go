// Command conformance runs the upstream e2e suite's conformance specs against kube-apiserver and against Watershed.
// Each server runs with kube-controller-manager and kube-scheduler, and each spec in its own process. The command
// writes both result lists side by side.
//
// With -node=real this machine is the node, with containerd, kubelet and kube-proxy, and all 446 specs run.
//
// With -specs=other the specs are the remaining specs of sig-api-machinery, sig-auth, sig-cli and sig-instrumentation,
// without disruptive specs and specs of optional features.
//
// With -node=kwok three nodes run no containers. The specs are those of sig-api-machinery, sig-apps, sig-auth, sig-cli,
// sig-instrumentation and sig-scheduling. Specs that need a container fail or time out on both servers. No spec is left
// out.
package main

import (
	"bytes"
	"context"
	_ "embed"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"watershed.dev/test/harness"
	"watershed.dev/test/node"
)

//go:embed specs.txt
var specs string

//go:embed specs-node.txt
var nodeSpecs string

var (
	out       = flag.String("out", "../.build/conformance", "The directory of results and of failed specs' output.")
	workers   = flag.Int("workers", 3, "Parallel specs; [Serial] specs run sequentially.")
	suite     = flag.String("specs", "conformance", "The specs: conformance or other.")
	limit     = flag.Duration("timeout", 3*time.Minute, "The timeout of one spec.")
	only      = flag.String("run", "", "A regular expression that selects specs.")
	reference = flag.Bool("reference", true, "Run kube-apiserver too.")
	nodes     = flag.String("node", "kwok", "kwok, or real: this machine, as root.")
	again     = flag.Bool("reference-failed", false, "Run on kube-apiserver only specs that fail on Watershed.")
)

func main() {
	testing.Init()
	flag.Parse()
	if err := os.MkdirAll(*out, 0o755); err != nil {
		log.Fatal(err)
	}
	var list []string
	switch {
	case *suite == "other":
		var err error
		if specs, err = otherSpecs(); err != nil {
			log.Fatal(err)
		}
	case *suite != "conformance":
		log.Fatalf("-specs=%s: want conformance or other", *suite)
	case *nodes == "real":
		specs = nodeSpecs
	}
	for _, s := range strings.Split(strings.TrimSpace(specs), "\n") {
		if regexp.MustCompile(*only).MatchString(s) {
			list = append(list, s)
		}
	}
	results := map[string]map[string]string{}
	// The harness needs a testing.TB, so each server runs as a test. Its processes end with the test.
	var tests []testing.InternalTest
	add := func(name string, start func(testing.TB) *harness.Server) {
		tests = append(tests, testing.InternalTest{Name: name, F: func(t *testing.T) {
			if *nodes == "real" {
				node.Prepare(t)
				s := start(t)
				s.Managers()
				node.Join(t, s, node.Options{})
				results[name] = run(name, s.Kubeconfig, wanted(name, list, results))
				return
			}
			s := start(t)
			s.Controllers()
			harness.Eventually(t, harness.Soon, func() error {
				out, err := s.TryKubectl("", "get", "nodes")
				if err != nil || strings.Count(out, " Ready ") != 3 {
					return fmt.Errorf("%v: %s", err, out)
				}
				taints, err := s.TryKubectl("", "get", "nodes", "-o", "jsonpath={.items[*].spec.taints}")
				if err != nil || taints != "" { // the suite requires schedulable nodes
					return fmt.Errorf("%v: %s", err, taints)
				}
				return nil
			})
			results[name] = run(name, s.Kubeconfig, wanted(name, list, results))
		}})
	}
	flags := []string{"--max-requests-inflight=3000", "--max-mutating-requests-inflight=1000"}
	if *nodes == "real" {
		flags = append(append(flags, node.Flags()...), "--bind-address=0.0.0.0")
	}
	add("watershed", func(t testing.TB) *harness.Server {
		if *nodes == "real" {
			return harness.Up(t, "", append(flags, "--tls-sans="+node.Address)...)
		}
		return harness.Up(t, "", flags...)
	})
	if *reference {
		add("kube-apiserver", func(t testing.TB) *harness.Server { return harness.Oracle(t, flags...) })
	}
	tests = append(tests, testing.InternalTest{Name: "report", F: func(t *testing.T) {
		for _, spec := range report(list, results) {
			t.Errorf("passes on kube-apiserver alone: %s", spec)
		}
	}})
	testing.Main(func(string, string) (bool, error) { return true, nil }, tests, nil, nil)
}

// The names of the specs of -specs=other.
var (
	otherSIGs = regexp.MustCompile(`^\[sig-(api-machinery|auth|cli|instrumentation)\]`)
	otherSkip = regexp.MustCompile(`\[Conformance\]|\[Disruptive\]|\[Feature:|\[FeatureGate:|\[Alpha\]|\[Beta\]`)
)

// otherSpecs lists the specs of -specs=other, a line each.
func otherSpecs() (string, error) {
	out, err := exec.Command(harness.Peer("e2e.test"), "--list-tests").Output()
	if err != nil {
		return "", fmt.Errorf("e2e.test --list-tests: %w", err)
	}
	var list []string
	for line := range strings.Lines(string(out)) {
		_, name, _ := strings.Cut(strings.TrimSpace(line), ": ") // after the file and the line
		if otherSIGs.MatchString(name) && !otherSkip.MatchString(name) {
			list = append(list, name)
		}
	}
	return strings.Join(list, "\n"), nil
}

// wanted returns the specs to run on a server.
func wanted(server string, list []string, results map[string]map[string]string) []string {
	if server != "kube-apiserver" || !*again {
		return list
	}
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return results["watershed"][s] == "pass" })
}

func run(server, kubeconfig string, list []string) map[string]string {
	results := map[string]string{}
	var mu sync.Mutex
	runOne := func(spec string) {
		at := time.Now()
		verdict := runSpec(server, kubeconfig, spec)
		mu.Lock()
		defer mu.Unlock()
		results[spec] = verdict
		fmt.Printf("%-15s %-7s %6.1fs  %s\n", server, verdict, time.Since(at).Seconds(), spec)
	}
	work := make(chan string)
	var wg sync.WaitGroup
	for range *workers {
		wg.Go(func() {
			for s := range work {
				runOne(s)
			}
		})
	}
	for _, s := range list {
		if !strings.Contains(s, "[Serial]") {
			work <- s
		}
	}
	close(work)
	wg.Wait()
	for _, s := range list {
		if strings.Contains(s, "[Serial]") {
			runOne(s)
		}
	}
	return results
}

// runSpec runs a spec in its own process.
func runSpec(server, kubeconfig, spec string) string {
	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Peer("e2e.test"), "--ginkgo.no-color", "--ginkgo.focus",
		strings.ReplaceAll(regexp.QuoteMeta(spec), `\ `, " "),
		"--provider=skeleton", "--disable-log-dump", "--kubeconfig", kubeconfig, "--allowed-not-ready-nodes=-1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	output, err := cmd.CombinedOutput()
	switch {
	case err == nil && bytes.Contains(output, []byte(" Passed")) && !bytes.Contains(output, []byte(" 0 Passed")):
		return "pass"
	case ctx.Err() != nil:
		keep(server, spec, output)
		return "timeout"
	}
	keep(server, spec, output)
	return "fail"
}

func keep(server, spec string, output []byte) {
	name := regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(spec, "_")
	dir := filepath.Join(*out, server)
	_ = os.MkdirAll(dir, 0o755)
	_ = os.WriteFile(filepath.Join(dir, name[:min(len(name), 150)]+".log"), output[max(0, len(output)-30000):], 0o644)
}

// report writes every result to a file. It returns the specs that kube-apiserver passes and Watershed does not.
func report(list []string, results map[string]map[string]string) (lost []string) {
	var b strings.Builder
	fmt.Fprintf(&b, "kube-apiserver\twatershed\tspec\n")
	count := map[string]int{}
	for _, s := range list {
		ref, ours := results["kube-apiserver"][s], results["watershed"][s]
		fmt.Fprintf(&b, "%s\t%s\t%s\n", ref, ours, s)
		count["kube-apiserver "+ref]++
		count["watershed "+ours]++
		if ref == "pass" && ours != "pass" {
			count["pass on kube-apiserver alone"]++
			lost = append(lost, s)
		}
	}
	path := filepath.Join(*out, "results.tsv")
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		log.Fatal(err)
	}
	fmt.Println(count, "in", path)
	return lost
}
