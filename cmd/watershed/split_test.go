package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/config"
)

// plannedSplit returns the processes that split would run in a new directory.
func plannedSplit(t *testing.T, args ...string) []*child {
	t.Helper()
	fs := newSplitFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	if err := config.Load(fs.FlagSet, append([]string{"--data-dir", t.TempDir(), "--v=2"}, args...)); err != nil {
		t.Fatal(err)
	}
	s, err := fs.newSplit()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	processes, err := s.plan()
	if err != nil {
		t.Fatal(err)
	}
	return processes
}

func settingsIn(t *testing.T, file string) map[string]any {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]any{}
	if err := yaml.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// A port is found once, although its process does not listen yet, and a previous address is not found.
func TestAPortIsFoundOnce(t *testing.T) {
	found := map[int]bool{}
	for range 2 {
		ports, err := freePorts(300)
		if err != nil {
			t.Fatal(err)
		}
		for _, port := range ports {
			found[port] = true
		}
	}
	if len(found) != 600 {
		t.Errorf("%d of 600 ports differ", len(found))
	}
	const previous = "127.0.0.1:20007"
	if _, err := freePorts(0, previous); err != nil || reserve(previous) == nil {
		t.Errorf("%s may be found again (%v)", previous, err)
	}
}

// The names of the processes of each placement.
func TestPlacements(t *testing.T) {
	for placement, want := range map[string]string{
		"split": "admission-0 authn-0 authz-0 etcd-0 etcd-1 etcd-2 gateway-0 gateway-1 nats-0 registry-0 registry-1 " +
			"watchfanout-0 watchfanout-1 watchfanout-2 xds-0",
		"all":     "etcd-0 etcd-1 etcd-2 nats-0 watershed-0 xds-0",
		"compact": "etcd-0 etcd-1 etcd-2 front-0 front-1 nats-0 watchfanout-0 watchfanout-1 watchfanout-2 xds-0",
	} {
		var names []string
		replicas := "watchfanout=3,etcd=3"
		if placement == "all" {
			replicas = "etcd=3"
		}
		for _, p := range plannedSplit(t, "--placement", placement, "--replicas", replicas) {
			names = append(names, p.name)
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: %s", placement, got)
		}
	}
}

// A start removes the configuration of processes of another placement, which check reported as processes that do not
// respond. It removes no file of the user, and nothing of a directory that the name of this directory matches.
func TestAStartRemovesTheConfigurationOfOtherProcesses(t *testing.T) {
	parent := t.TempDir()
	s := &splitRun{layout: &layout{dir: filepath.Join(parent, "ws[1]")}}
	other := &splitRun{layout: &layout{dir: filepath.Join(parent, "ws1")}}
	create := func(s *splitRun, names ...string) {
		for _, name := range names {
			path := s.configFile(name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	create(other, "gateway-0")
	create(s, "front-0", "gateway-0", "etcd-0", "encryption", "gateway-edge", "my-gateway-0")
	received := filepath.Join(s.dir, "xds", "gateway-0") // in a copied directory, sockets of the original
	if err := os.MkdirAll(received, 0o700); err != nil {
		t.Fatal(err)
	}
	planned := []*child{{config: s.configFile("front-0")}, {config: s.configFile("etcd-0")}}
	if err := s.removeOthers(planned); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(received); err == nil {
		t.Error("addresses of an earlier start are left")
	}
	left := func(s *splitRun) (names []string) {
		files, err := os.ReadDir(filepath.Join(s.dir, "config"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			names = append(names, strings.TrimSuffix(f.Name(), ".yaml"))
		}
		return names
	}
	if got := fmt.Sprint(left(s), left(other)); got !=
		"[encryption etcd-0 front-0 gateway-edge my-gateway-0] [gateway-0]" {
		t.Errorf("there are %s", got)
	}
}

// Every process is configured with its identity, its targets and the addresses of its dependencies.
func TestProcessSettings(t *testing.T) {
	for placement, servers := range map[string]int{"split": 8, "compact": 5} {
		var addresses []string
		for _, p := range plannedSplit(t, "--placement", placement, "--replicas=watchfanout=3,etcd=3") {
			settings := settingsIn(t, p.config)
			if p.set == "etcd" && strings.Count(settings["initial-cluster"].(string), "https://") != 3 {
				t.Errorf("a member has the members %s", settings["initial-cluster"])
			}
			targets, _ := settings["target"].([]any)
			if len(targets) == 0 { // etcd, NATS or xds
				continue
			}
			if a, ok := settings["rpc-address"].(string); ok {
				addresses = append(addresses, a)
			}
			for _, target := range targets {
				for _, peer := range modules.Get(target.(string)).DependsOn {
					all, _ := settings[peer+"-addresses"].(string)
					switch {
					case slices.Contains(targets, any(peer)):
						if all != "" {
							t.Errorf("%s has addresses of %s, which is in its process", p.name, peer)
						}
					case all == "":
						t.Errorf("%s has no address of %s", p.name, peer)
					case peer == "watchfanout" && strings.Count(all, ",") != 2:
						t.Errorf("%s has the addresses %s", p.name, all)
					}
				}
			}
			if settings["rpc-cert-file"] == "" || fmt.Sprint(settings["v"]) != "2" {
				t.Errorf("%s: %v", p.name, settings)
			}
		}
		slices.Sort(addresses)
		if n := len(slices.Compact(addresses)); n != servers {
			t.Errorf("%s: %d addresses of %d servers: %q", placement, n, servers, addresses)
		}
	}
}

// Services listen on the network of --rpc-network, and their clients have these addresses.
func TestServicesAreAtSocketsOrPorts(t *testing.T) {
	for network, prefix := range map[string]string{"unix": "unix:/", "tcp": "127.0.0.1:"} {
		addresses := 0
		for _, p := range plannedSplit(t, "--rpc-network", network) {
			for key, v := range settingsIn(t, p.config) {
				if key != "rpc-address" && key != "xds-servers" && !strings.HasSuffix(key, "-addresses") {
					continue
				}
				for a := range strings.SplitSeq(v.(string), ",") {
					addresses++
					if !strings.HasPrefix(a, prefix) {
						t.Errorf("%s: %s: %s has %q", network, p.name, key, a)
					}
				}
			}
		}
		if addresses < 20 {
			t.Errorf("%s: %d addresses are configured", network, addresses)
		}
	}
}

// Settings of the directory that conflict with a flag are omitted.
func TestConflictingSettingsAreOmitted(t *testing.T) {
	const plugins, keys = "enable-admission-plugins", "service-account-key-file"
	for flag, left := range map[string]map[string]bool{
		"": {plugins: true, keys: true, kubeletCA: true},
		"--disable-admission-plugins=PodSecurity":                 {plugins: true, keys: true, kubeletCA: true},
		"--disable-admission-plugins=PodSecurity,NodeRestriction": {keys: true, kubeletCA: true},
		"--service-account-signing-endpoint=/s":                   {plugins: true, kubeletCA: true},
		"--client-ca-file=/ca.crt":                                {plugins: true, keys: true},
	} {
		var flags []string
		if flag != "" {
			flags = []string{flag}
		}
		has := map[string]bool{}
		for _, p := range plannedSplit(t, flags...) {
			for name := range settingsIn(t, p.config) {
				has[name] = true
			}
		}
		for _, name := range []string{plugins, keys, kubeletCA} {
			if has[name] != left[name] {
				t.Errorf("%q: --%s is there: %v", flag, name, has[name])
			}
		}
	}
}

// split passes each service its own flags, and the settings that derive from them.
func TestSplitHandsFlagsOn(t *testing.T) {
	settings := map[string]map[string]any{}
	for _, p := range plannedSplit(t, "--authorization-mode=RBAC,AlwaysAllow", "--anonymous-auth=true",
		"--service-account-issuer=https://a", "--service-account-issuer=https://b", "--watch-ring-bytes=65536",
		"--enable-admission-plugins=NodeRestriction", "--event-ttl=2h", "--tls-sni-cert-key=/a.crt,/a.key",
		"--tls-sni-cert-key=/b.crt,/b.key:b.example", "--oidc-issuer-url=https://i", "--oidc-client-id=c",
		"--oidc-required-claim=a=b,c", "--oidc-required-claim=d=e", "--tracing-sampling-ratio=0.5",
		"--logging-format=json") {
		settings[p.set] = settingsIn(t, p.config)
	}
	for _, want := range []struct{ service, name, value string }{
		{"authz", "authorization-mode", "[RBAC AlwaysAllow]"},
		{"authn", "anonymous-auth", "false"},
		{"authn", "service-account-issuer", "[https://a https://b]"},
		{"registry", "service-account-issuer", "[https://a https://b]"},
		{"gateway", "api-audiences", "[https://a https://b]"},
		{"watchfanout", "watch-ring-bytes", "65536"},
		{"admission", "enable-admission-plugins", "[NodeRestriction]"},
		{"registry", "event-ttl", "2h0m0s"},
		{"xds", "tracing-sampling-ratio", "0.5"},
		{"gateway", "v", "2"},
		{"etcd", "v", "2"},
		{"etcd", "logging-format", "json"},
		{"nats", "logging-format", "json"},
		{"gateway", "tls-sni-cert-key", "[/a.crt,/a.key /b.crt,/b.key:b.example]"},
		{"authn", "oidc-required-claim", "[a=b,c d=e]"},
	} {
		if got := fmt.Sprint(settings[want.service][want.name]); got != want.value {
			t.Errorf("%s: --%s %s, not %s", want.service, want.name, got, want.value)
		}
	}
	if _, ok := settings["gateway"]["watch-ring-bytes"]; ok {
		t.Error("the gateway is told what it does not know")
	}
}

// An invalid number of replicas is rejected with the name of the flag.
func TestInvalidReplicasAreRejected(t *testing.T) {
	for _, odd := range []map[string]int{{"nobody": 1}, {"gateway": 0}, {"etcd": -1}, {"watchfanout": 65}, {"nats": 2}} {
		if _, err := replicaCounts(placements["split"], odd); err == nil ||
			!strings.HasPrefix(err.Error(), "--replicas ") {
			t.Errorf("%v: %v", odd, err)
		}
	}
	counts, err := replicaCounts(placements["split"], map[string]int{"gateway": 5})
	if err != nil || counts["gateway"] != 5 || counts["authn"] != 1 || placements["split"][5].replicas != 2 {
		t.Errorf("%v, %v", counts, err)
	}
}

// Only the owner can read a data directory.
func TestKubeconfigsAreTheirOwners(t *testing.T) {
	l, err := openLayout(t.TempDir(), "0.0.0.0", 6443, []string{"example.com"}, logFiles{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	for _, name := range []string{"authn", "authz", "admission"} {
		if info, err := os.Stat(l.pki.Kubeconfig(name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if info, err := os.Stat(l.pki.AdminKubeconfig()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// Each gateway has its own audit log.
func TestAnAuditLogIsOneProcess(t *testing.T) {
	for n, want := range []string{"/x/audit.log", "/x/audit-1.log", "/x/audit-2.log"} {
		if got := perProcessPath("/x/audit.log", n); got != want {
			t.Errorf("%s is not %s", got, want)
		}
	}
	if got := perProcessPath("-", 2); got != "-" {
		t.Errorf("standard output became %s", got)
	}
}

// split is ready once each process with services is ready, and not before the last.
func TestSplitWaitsForEveryProcess(t *testing.T) {
	dir := t.TempDir()
	var isReady [2]atomic.Bool
	asked := make(chan int, 100)
	s := &splitRun{
		layout:    &layout{dir: dir},
		show:      &progress{w: io.Discard},
		processes: []*child{{set: "nats", name: "nats-0"}},
	}
	for n := range isReady {
		socket := filepath.Join(dir, fmt.Sprint(n))
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if !isReady[n].Load() {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			asked <- n
		}))
		server.Listener.Close()
		server.Listener = l
		server.Start()
		t.Cleanup(server.Close)
		s.processes = append(s.processes, &child{set: "gateway", name: fmt.Sprintf("gateway-%d", n), debug: socket})
	}
	done := make(chan error, 1)
	go func() { done <- s.ready(t.Context()) }()
	for n := range isReady {
		for <-asked != n {
		}
		select {
		case err := <-done:
			t.Errorf("split is ready without gateway-%d: %v", n, err)
		default:
		}
		isReady[n].Store(true)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	isReady[1].Store(false)
	ctx, stop := context.WithCancelCause(t.Context())
	refused := errors.New("refused")
	stop(refused)
	if err := s.ready(ctx); !errors.Is(err, refused) {
		t.Error(err)
	}
}

// The processes of a set stop together, but members of etcd after each other. A leader of etcd waits for seconds for
// another member, if the others stop with it.
func TestMembersOfEtcdStopAfterEachOther(t *testing.T) {
	for set, together := range map[string]bool{"nats": true, "etcd": false} {
		synctest.Test(t, func(t *testing.T) {
			s := &splitRun{show: &progress{w: io.Discard}}
			for n := range 3 {
				s.processes = append(s.processes, &child{
					set: set, name: fmt.Sprintf("%s-%d", set, n), dir: t.TempDir(), done: make(chan struct{}),
				})
			}
			go s.stop()
			want := 1
			if together {
				want = 3
			}
			for _, p := range slices.Backward(s.processes) {
				synctest.Wait() // until each stop waits for its process
				stopping := 0
				for _, p := range s.processes {
					if p.stopped {
						stopping++
					}
				}
				if stopping != want {
					t.Errorf("%d processes of %s stop, not %d", stopping, set, want)
				}
				close(p.done)
				if !together {
					want++
				}
			}
		})
	}
}

// Processes run without the socket of split scale, as on a full disk.
func TestSplitRunsWithoutItsSocket(t *testing.T) {
	s := &splitRun{layout: &layout{sockets: filepath.Join(t.TempDir(), "none")}, show: &progress{w: io.Discard}}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); s.serveControl(ctx) }()
		synctest.Wait()
		select {
		case <-ended:
			t.Error("split stops its processes")
		default:
		}
		cancel()
		<-ended
	})
}

// A request to scale with an invalid number changes nothing.
func TestScaleChecksAllNumbersFirst(t *testing.T) {
	s := &splitRun{sets: placements["split"], counts: map[string]int{}}
	for _, to := range []url.Values{{"gateway": {"2"}, "nats": {"3"}}, {"gateway": {"2"}, "authn": {"0"}},
		{"gateway": {"65"}}, {"gateway": {"x"}}} {
		if report, err := s.scaleAll(to); err == nil || report != "" || len(s.processes) > 0 {
			t.Errorf("%v: %q, %v", to, report, err)
		}
	}
}

// The serving certificate has the address of the Service kubernetes.
func TestTheCertificateHasTheServicesAddress(t *testing.T) {
	for ranges, want := range map[string]string{"10.43.0.0/16,fd00::/108": "[10.43.0.1]", "x": "[]"} {
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		fs.String("service-cluster-ip-range", ranges, "")
		if got := fmt.Sprint(advertised(fs)); got != want {
			t.Errorf("%s: %s, not %s", ranges, got, want)
		}
	}
}
