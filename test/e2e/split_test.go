package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// etcdWatchers returns the number of watches that etcd reports.
func etcdWatchers(t *testing.T, s *harness.Server) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.Dir, "config", "etcd-0.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	url := regexp.MustCompile(`listen-metrics-urls: (\S+)`).FindStringSubmatch(string(b))[1]
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	m := regexp.MustCompile(`(?m)^etcd_debugging_mvcc_watcher_total (\d+)`).FindSubmatch(body)
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

// expectOneEtcdWatch waits until etcd serves a single watch. After an election it may serve none or two for a moment.
func expectOneEtcdWatch(t *testing.T, s *harness.Server) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error {
		if n := etcdWatchers(t, s); n != 1 {
			return fmt.Errorf("etcd serves %d watches", n)
		}
		return nil
	})
}

func TestSplitServesControllersWithOneEtcdWatch(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "", "--replicas=watchfanout=3")
	for range 5 {
		w, err := s.Client().CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
	}
	workloadsComeTo(t, s)
	expectOneEtcdWatch(t, s)
}

// TestAnyProcessOfSplitMayBeKilled kills each process in turn: kubectl goes on, 300 watches lose and repeat no event,
// and only the watches of a killed gateway end.
func TestAnyProcessOfSplitMayBeKilled(t *testing.T) {
	t.Parallel()
	t.Run("split", func(t *testing.T) { killEach(t, harness.Split(t, ""), 12, "gateway") })
	t.Run("compact", func(t *testing.T) { killEach(t, harness.Compact(t, ""), 7, "front") })
}

// killEach kills every process of a server in turn. The connections of clients end with the processes of a set.
func killEach(t *testing.T, s *harness.Server, processes int, set string) {
	w := witness(t, s, 300, 50)
	var created []string
	create := func(name string) {
		t.Helper()
		created = append(created, "k-"+name)
		s.Kubectl("create", "configmap", "k-"+name)
		w.expect(created)
	}
	files, err := filepath.Glob(filepath.Join(s.Dir, "*.pid"))
	if err != nil || len(files) != processes {
		t.Fatalf("%d pid files (%v)", len(files), err)
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".pid")
		if strings.HasPrefix(name, set) {
			continue // killed below
		}
		kill(t, f)
		create(name)
		if broken := w.takeBroken(); len(broken) > 0 {
			t.Fatalf("%d watches ended when %s was killed", len(broken), name)
		}
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".pid")
		if !strings.HasPrefix(name, set) {
			continue
		}
		clients, err := sockets(pid(t, s, name), s.Port, "01")
		if err != nil {
			t.Fatal(err)
		}
		old := kill(t, f)
		s.Kubectl("get", "configmaps")
		harness.Eventually(t, harness.Soon, func() error { // the next process is killed when this one has restarted
			b, err := os.ReadFile(f)
			if err != nil || string(b) == old {
				return fmt.Errorf("%s is not started again", f)
			}
			pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
			if listening, err := sockets(pid, s.Port, "0A"); err != nil || len(listening) == 0 {
				return fmt.Errorf("process %d does not listen on %d: %v", pid, s.Port, err)
			}
			return nil
		})
		create(name)
		broken := w.takeBroken()
		t.Logf("%d watches ended when %s was killed", len(broken), name)
		for _, port := range broken {
			if !slices.Contains(clients, port) {
				t.Errorf("a watch from port %d ended when %s was killed, which did not serve it", port, name)
			}
		}
	}
}

// TestTheInnerNetworkIsClosedToClients checks that the inner network rejects certificates of the cluster's clients, and
// rejects a service that is not an allowed client of etcd.
func TestTheInnerNetworkIsClosedToClients(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	b, err := os.ReadFile(filepath.Join(s.Dir, "config", "registry-0.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	etcd := regexp.MustCompile(`etcd-servers: (\S+)`).FindStringSubmatch(string(b))[1]
	for _, id := range []string{"client-authn", "inner-watchfanout"} {
		out, err := exec.Command(harness.Peer("etcdctl"), "--endpoints", etcd, "--cacert",
			filepath.Join(s.Dir, "pki", "inner-ca.crt"), "--cert", filepath.Join(s.Dir, "pki", id+".crt"),
			"--key", filepath.Join(s.Dir, "pki", id+".key"), "--command-timeout=2s", "get",
			"/registry/namespaces/default").CombinedOutput()
		if err == nil {
			t.Errorf("%s reads etcd:\n%s", id, out)
		}
	}
}

// TestSplitStopsAtARejectedFlag checks that split stops, as `up` does, if a process rejects a flag. It prints the
// process's own error.
func TestSplitStopsAtARejectedFlag(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	p := harness.Start(t, dir, "split", harness.Watershed(), "split", "--data-dir", dir, "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", porttest.FreePort(t)), "--audit-policy-file=/none", "--audit-log-path=-")
	if err := p.Wait(harness.Soon); err == nil {
		t.Error("it ended well")
	}
	out, err := os.ReadFile(p.Log)
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(
		`watershed split: gateway-\d: gateway: --audit-policy-file "/none": open /none: no such file`)
	if !want.Match(out) {
		t.Errorf("it says %s", out)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.pid")); len(left) > 0 {
		t.Errorf("it left %v", left)
	}
}

// TestAFrozenRegistryIsPassedBy checks that reads avoid a frozen registry, which keeps its connections open without a
// response until they time out after 13 s (platform/rpc, Dial). A read, and all reads of a kind together, take less
// time: rpc.Hedged calls the other registry after 1.1 s, and ejects the frozen registry.
func TestAFrozenRegistryIsPassedBy(t *testing.T) {
	s := harness.Split(t, "")
	const timeout = 12 * time.Second
	config := s.Config()
	config.Timeout, config.WarningHandler = timeout, rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	configMaps := client.CoreV1().ConfigMaps("default")
	const many = 20 // each registry serves some of them
	for i := range many {
		harness.Write(t, func() error {
			_, err := configMaps.Create(t.Context(), &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)},
			}, metav1.CreateOptions{})
			return err
		})
	}
	list := func(path string) func(int) error {
		return func(int) error {
			return client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").
				Do(t.Context()).Error()
		}
	}
	reads := []struct {
		what string
		read func(i int) error
	}{
		{"a GET", func(i int) error {
			_, err := configMaps.Get(t.Context(), fmt.Sprint("c", i%many), metav1.GetOptions{})
			return err
		}},
		{"a list from the watch tier", list("/api/v1/namespaces/default/configmaps")},
		{"a list from registry", list("/api/v1/componentstatuses")},
	}
	for _, name := range []string{"registry-0", "registry-1"} {
		registry := pid(t, s, name)
		harness.Eventually(t, harness.Soon, func() error { // both registries respond
			for i := range many {
				for _, r := range reads {
					if err := r.read(i); err != nil {
						return err
					}
				}
			}
			return nil
		})
		freeze(t, registry)
		for _, r := range reads {
			var longest, total time.Duration
			for i := range 2 * many {
				begun := time.Now()
				err := r.read(i)
				took := time.Since(begun)
				if err != nil {
					t.Errorf("%s while %s is frozen, after %v: %v", r.what, name, took, err)
				}
				longest, total = max(longest, took), total+took
			}
			t.Logf("%s while %s is frozen: %v at most, %d in %v", r.what, name, longest.Round(time.Millisecond), 2*many,
				total.Round(time.Millisecond))
			if total > timeout {
				t.Errorf("%d times %s took %v while %s is frozen", 2*many, r.what, total, name)
			}
		}
		if err := syscall.Kill(registry, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
}

// No connection of the shared port reaches a gateway that cannot serve yet: right after the start of split, and while
// more gateways start.
func TestAGatewayServesOnceItListens(t *testing.T) {
	s := harness.Split(t, "")
	conf, err := rest.TLSConfigFor(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: time.Minute,
		Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}}
	poll := func(until time.Time, done func() bool) {
		for !done() {
			if time.Now().After(until) {
				t.Fatal("a gateway has served no list")
			}
			for _, page := range []string{"/livez", "/readyz", "/healthz", "/apis/batch/v1/cronjobs"} {
				resp, err := client.Get(s.Config().Host + page + "?verbose")
				if err != nil {
					t.Fatal(err)
				}
				body, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					t.Fatalf("%s: %d %s", page, resp.StatusCode, body)
				}
			}
		}
	}
	// no service lists CronJobs
	lists := regexp.MustCompile(`(?m)^apiserver_request_total\{[^}]*resource="cronjobs"[^}]*verb="LIST"[^}]*\}`)
	served := func(name string) bool {
		resp, err := s.Debug(name).Get("http://" + name + "/metrics")
		if err != nil {
			return false // the gateway starts
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return lists.Match(text)
	}
	poll(time.Now().Add(harness.Soon), func() bool { return served("gateway-0") && served("gateway-1") })
	s.Scale("gateway=5") // it does not wait until the new gateways are ready
	poll(time.Now().Add(harness.Soon), func() bool {
		return served("gateway-2") && served("gateway-3") && served("gateway-4")
	})
}
