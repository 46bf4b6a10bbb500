// Command cmd runs kubernetes' test/cmd: shell scripts of kubectl commands and of assertions about their output. It
// runs them with kube-apiserver, then with Watershed's command kube-apiserver, both with kube-controller-manager. A
// test that passes with kube-apiserver only fails the run, and so does a test with fewer assertions. With -server, each
// test that fails fails the run. A test that fails runs a second time, because the scripts have short timeouts.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

var (
	what = flag.String("what", "", "Names of tests without run_ and _tests, separated by spaces. Empty: all.")
	side = flag.String("server", "both", "The server: kube-apiserver, watershed or both.")
	out  = flag.String("out", "../.build/test-cmd", "The directory of the scripts and of their output.")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	dir, err := filepath.Abs(*out)
	if err != nil {
		return err
	}
	programs := map[string]string{
		"kube-apiserver": harness.Peer("kube-apiserver"),
		"watershed":      harness.Watershed(),
	}
	all := map[string][]result{}
	for _, name := range []string{"kube-apiserver", "watershed"} {
		if *side != "both" && *side != name {
			continue
		}
		if all[name], err = test(filepath.Join(dir, name), programs[name], *what); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if names := again(all[name]); names != "" {
			fmt.Printf("%s: these tests have failed, and run a second time: %s\n", name, names)
			second, err := test(filepath.Join(dir, name+"-second"), programs[name], names)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			replace(all[name], second)
		}
		fmt.Println(name+":", summary(all[name]))
	}
	if *side != "both" {
		return failures(all[*side])
	}
	return compare(all["kube-apiserver"], all["watershed"])
}

// result is the result of a function of the scripts.
type result struct {
	name   string
	passed bool
	// assertions counts the assertions that succeeded.
	assertions int
}

func summary(results []result) string {
	var passed, assertions int
	for _, r := range results {
		assertions += r.assertions
		if r.passed {
			passed++
		}
	}
	return fmt.Sprintf("%d of %d tests pass, %d assertions", passed, len(results), assertions)
}

// again returns the names of the failed tests in the form of the flag, which has no form for a few other names.
func again(results []result) string {
	var names []string
	for _, r := range results {
		name, begins := strings.CutPrefix(r.name, "run_")
		name, ends := strings.CutSuffix(name, "_tests")
		if !r.passed && begins && ends {
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

// replace replaces results with the results of a second run.
func replace(results, second []result) {
	for i := range results {
		for _, r := range second {
			if r.name == results[i].name {
				results[i] = r
			}
		}
	}
}

// failures returns an error for each test that fails.
func failures(results []result) error {
	var errs []error
	for _, r := range results {
		if !r.passed {
			errs = append(errs, fmt.Errorf("%s: fails", r.name))
		}
	}
	return errors.Join(errs...)
}

// compare returns an error for each test that passes with kube-apiserver only, or has fewer assertions. It prints the
// tests that fail with kube-apiserver.
func compare(theirs, ours []result) error {
	var errs []error
	for _, want := range theirs {
		i := slices.IndexFunc(ours, func(r result) bool { return r.name == want.name })
		switch {
		case i < 0:
			errs = append(errs, fmt.Errorf("%s: did not run with Watershed", want.name))
		case want.passed && !ours[i].passed:
			errs = append(errs, fmt.Errorf("%s: passes with kube-apiserver only", want.name))
		case ours[i].assertions < want.assertions:
			errs = append(errs, fmt.Errorf("%s: %d assertions, %d with kube-apiserver", want.name, ours[i].assertions,
				want.assertions))
		case !want.passed:
			fmt.Printf("%s: fails with kube-apiserver; passes with Watershed: %t\n", want.name, ours[i].passed)
		}
	}
	return errors.Join(errs...)
}

// test runs the scripts with a server in dir, which it replaces. names is empty for all tests.
func test(dir, program, names string) ([]result, error) {
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	root, bin, tmp := filepath.Join(dir, "kubernetes"), filepath.Join(dir, "bin"), filepath.Join(dir, "tmp")
	binaries := map[string]string{"kube-apiserver": program}
	for _, name := range []string{"kubectl", "kubectl-convert", "kube-controller-manager"} {
		binaries[name] = harness.Peer(name)
	}
	err := errors.Join(os.MkdirAll(tmp, 0o755), copyScripts(root),
		link(filepath.Join(root, "_output", "bin"), binaries), link(bin, map[string]string{
			"etcd": harness.Peer("etcd"),
			"make": "/bin/true", // the binaries exist
		}))
	if err != nil {
		return nil, err
	}
	etcd, err := porttest.UnusedPort()
	if err != nil {
		return nil, err
	}
	secure, err := porttest.UnusedPort()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("bash", "hack/make-rules/test-cmd.sh")
	cmd.Dir = root
	cmd.Env = append(os.Environ(),
		"PATH="+bin+":"+os.Getenv("PATH"), "TMPDIR="+tmp, "ETCD_PORT="+strconv.Itoa(etcd),
		"SECURE_API_PORT="+strconv.Itoa(secure),
		"ETCD_LOGFILE="+filepath.Join(dir, "etcd.log"),
		"SERVICE_ACCOUNT_KEY="+filepath.Join(tmp, "sa.key"), "KUBE_JUNIT_REPORT_DIR="+filepath.Join(dir, "junit"),
		"KUBEADM_PATH="+harness.Peer("kubeadm"), "WHAT="+names,
		"ALLOW_SKEW=y") // kubectl and Watershed may be built from different commits
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	output, err := os.Create(filepath.Join(dir, "output.log"))
	if err != nil {
		return nil, err
	}
	defer output.Close()
	cmd.Stderr = output
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }() // nothing of a run remains
	results, err := parse(io.TeeReader(stdout, output))
	if err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil && !slices.ContainsFunc(results, func(r result) bool { return !r.passed }) {
		return nil, fmt.Errorf("%w; the output is in %s", err, output.Name())
	}
	return results, nil
}

var (
	begins    = regexp.MustCompile(`^\+\+\+ Running case: test-cmd\.(\S+)`)
	ends      = regexp.MustCompile(`\+\+\+ exit code: (\d+)$`)       // also after output without a newline
	successes = regexp.MustCompile(`(^|: |^\x1b\[\d+m)Successful\b`) // also in color
)

// parse reads the output of the scripts. It prints each result.
func parse(stdout io.Reader) (results []result, err error) {
	r := bufio.NewReader(stdout)
	var now result
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			if now.name != "" {
				results = append(results, now) // without an end
			}
			if err == io.EOF {
				err = nil
			}
			return results, err
		}
		line = bytes.TrimSuffix(line, []byte("\n"))
		if m := begins.FindSubmatch(line); m != nil {
			if now.name != "" {
				results = append(results, now)
			}
			now = result{name: string(m[1])}
		} else if m := ends.FindSubmatch(line); m != nil && now.name != "" {
			now.passed = string(m[1]) == "0"
			if now.name != "record_command_canary" { // it shows that a failure is seen
				results = append(results, now)
				fmt.Printf("%-5t %4d  %s\n", now.passed, now.assertions, now.name)
			}
			now = result{}
		} else if successes.Match(line) {
			now.assertions++
		}
	}
}

// copyScripts copies the scripts and their data from the module. The scripts write beside themselves.
func copyScripts(root string) error {
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes").Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	source := string(bytes.TrimSpace(module))
	for _, dir := range []string{"hack", "test/cmd", "test/fixtures", "test/e2e/testing-manifests",
		"third_party/forked/shell2junit"} {
		err := filepath.WalkDir(filepath.Join(source, dir), func(path string, d fs.DirEntry, err error) error {
			to := root + strings.TrimPrefix(path, source)
			if err != nil || d.IsDir() {
				return errors.Join(err, os.MkdirAll(to, 0o755))
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			mode := fs.FileMode(0o644)
			if bytes.HasPrefix(text, []byte("#!")) { // a module has no modes
				mode = 0o755
			}
			return os.WriteFile(to, text, mode)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// link makes a directory with links by name.
func link(dir string, targets map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, target := range targets {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}
