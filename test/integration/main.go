// Command integration runs packages of kubernetes' own test/integration, first as they are, with kube-apiserver in the
// test process, then with an overlay that starts `watershed up` instead. It compares the results of each test.
//
// record/reference.tsv has the results of kube-apiserver, which a run reuses unless -reference is set. record/known.tsv
// has the tests that pass with kube-apiserver only, each with its reason. A test that fails without a reason, and a
// reason without its failure, fail the run. A test that fails without a reason runs a second time before, because
// upstream's tests have short timeouts.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
	"watershed.dev/test/integration/server"
)

var (
	packages = flag.String("packages", "short",
		"Packages below test/integration, separated by commas, or a list: short, all.")
	tests     = flag.String("run", "", "A regular expression that selects tests.")
	reference = flag.Bool("reference", false, "Run kube-apiserver too, and record its results.")
	ours      = flag.Bool("ours", true, "Run Watershed.")
	record    = flag.Bool("record", false, "Write record/ and the page of the results.")
	out       = flag.String("out", "../.build/integration", "The directory of the overlay and of failed tests' output.")
	ldflags   = flag.String("ldflags", "",
		"The linker's flags of the tests, which compare the server's version with their own.")
	limit = flag.Duration("timeout", time.Hour, "The timeout of a package.")
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
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	work, overlay, err := workspace(harness.Root(), dir)
	if err != nil {
		return err
	}
	r, err := readRecords("integration/record")
	if err != nil {
		return err
	}
	upstream := []string{"GOWORK=" + work, "GOFLAGS=-trimpath"}
	overlaid := []string{"GOWORK=" + work, "GOFLAGS=-trimpath -overlay=" + overlay}
	var problems []error
	for _, name := range selected(*packages) {
		if *reference || r.reference[name] == nil {
			results, err := test(name, *tests, filepath.Join(dir, "kube-apiserver"), upstream...)
			if err != nil {
				return err
			}
			if err := r.addReference(name, results); err != nil {
				return err
			}
		}
		if !*ours {
			continue
		}
		results, err := test(name, *tests, filepath.Join(dir, "watershed"), overlaid...)
		if err != nil {
			return err
		}
		if again := r.unexplained(name, results); len(again) > 0 {
			fmt.Printf("%s: these tests have failed, and run a second time: %s\n", name, strings.Join(again, " "))
			pattern := "^(" + strings.Join(again, "|") + ")$"
			second, err := test(name, pattern, filepath.Join(dir, "watershed-second"), overlaid...)
			if err != nil {
				return err
			}
			results.replace(second)
		}
		problems = append(problems, r.compare(name, results)...)
	}
	if *record {
		return errors.Join(append(problems, r.write())...)
	}
	return errors.Join(problems...)
}

func output(name string, args ...string) (string, error) {
	b, err := exec.Command(name, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(b)), nil
}

// event is a line of go test -json.
type event struct {
	Action, Test, Output string
	Elapsed              float64
}

// test runs the tests of a package that a pattern selects, with more variables for the go command. It writes the output
// of each failed test to a file in dir.
func test(name, pattern, dir string, env ...string) (results, error) {
	dir = filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	args := []string{"test", "-json", "-count=1", "-vet=off", "-parallel=2", "-timeout=" + limit.String(),
		"-ldflags=" + *ldflags}
	if pattern != "" {
		args = append(args, "-run="+pattern)
	}
	cache, err := output("go", "env", "GOMODCACHE")
	if err != nil {
		return nil, err
	}
	etcd := "http://127.0.0.1:1" // kubernetes' packages start their own
	if strings.HasPrefix(name, extensions) {
		url, stop, err := startEtcd(dir)
		if err != nil {
			return nil, err
		}
		defer stop()
		etcd = url
	}
	cmd := exec.Command("go", append(args, importPath(name))...)
	cmd.Env = append(append(os.Environ(), env...),
		"PATH="+filepath.Join(harness.Root(), ".build", "bin")+":"+os.Getenv("PATH"),
		"CGO_ENABLED=0",
		// Upstream finds its certificates for tests by the path of a source file, whose beginning -trimpath removes.
		"TEST_SRCDIR="+cache,
		"TEST_WORKSPACE=.",
		"KUBE_INTEGRATION_ETCD_URL="+etcd,
		server.Binary+"="+harness.Watershed(),
		server.Logs+"="+dir,
	)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	results, err := collect(stdout, dir)
	if err != nil {
		return nil, err
	}
	_ = cmd.Wait() // a failed test is a result
	if len(results) == 0 {
		return nil, fmt.Errorf("%s has no results; its output is in %s", name, dir)
	}
	return results, nil
}

// extensions is the name of the integration tests of k8s.io/apiextensions-apiserver, and the prefix of its packages.
const extensions = "apiextensions"

func importPath(name string) string {
	if rest, ok := strings.CutPrefix(name, extensions); ok {
		return "k8s.io/apiextensions-apiserver/test/integration" + rest
	}
	return "k8s.io/kubernetes/test/integration/" + name
}

// startEtcd starts an etcd with its data in dir. Its URL is of HTTP: some tests open it with a TLS configuration, which
// etcd's client uses for a socket.
func startEtcd(dir string) (url string, stop func(), err error) {
	port, err := porttest.UnusedPort()
	if err != nil {
		return "", nil, err
	}
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	cmd := exec.Command(harness.Peer("etcd"), "--data-dir="+filepath.Join(dir, "etcd"), "--listen-client-urls="+url,
		"--advertise-client-urls="+url, "--listen-peer-urls=http://127.0.0.1:0", "--log-level=error")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	return url, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(filepath.Join(dir, "etcd"))
	}, nil
}

// collect reads the events of a package, and prints the result of each top-level test.
func collect(events io.Reader, dir string) (results, error) {
	all := results{}
	output := map[string]*strings.Builder{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Println(lines.Text())
			continue
		}
		if output[e.Test] == nil {
			output[e.Test] = &strings.Builder{}
		}
		switch e.Action {
		case "output", "build-output":
			output[e.Test].WriteString(e.Output)
			continue
		case "run":
			if e.Test != "" {
				all[e.Test] = failed // unless the test ends otherwise: a panic or the timeout ends all tests
			}
			continue
		case pass, skipped, failed:
		default:
			continue
		}
		if e.Test != "" {
			all[e.Test] = e.Action
		}
		if e.Action == failed || e.Action == skipped || e.Test == "" {
			file := strings.NewReplacer("/", "_", " ", "_").Replace(e.Test)
			if file == "" {
				file = "package"
			}
			path := filepath.Join(dir, file[:min(len(file), 150)]+".log")
			if err := os.WriteFile(path, []byte(output[e.Test].String()), 0o600); err != nil {
				return nil, err
			}
		}
		if !strings.Contains(e.Test, "/") {
			fmt.Printf("%-5s %7.1fs  %s %s\n", e.Action, e.Elapsed, filepath.Base(dir), e.Test)
		}
		delete(output, e.Test)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	for name, b := range output { // tests without an end
		file := strings.NewReplacer("/", "_", " ", "_").Replace(name)
		_ = os.WriteFile(filepath.Join(dir, "unfinished-"+file[:min(len(file), 150)]+".log"), []byte(b.String()), 0o600)
	}
	return all, nil
}
