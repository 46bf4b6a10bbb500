package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
	"watershed.dev/test/tamper"
)

// finding is a finding of `watershed check -o json`.
type finding struct{ Check, Level, Problem, Remedy, Docs string }

// runCheck runs `watershed check` and returns the findings above the level ok, and the exit code. It fails without a
// list of findings.
func runCheck(t *testing.T, args ...string) (found []finding, code int, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Watershed(), append([]string{"check", "-o", "json"}, args...)...)
	out, err := cmd.Output()
	var all struct{ Findings []finding }
	if jerr := json.Unmarshal(out, &all); jerr != nil {
		return nil, 0, fmt.Errorf("%w: %w\n%s", jerr, cmp.Or(err, jerr), out)
	}
	for _, f := range all.Findings {
		if f.Level != "ok" {
			found = append(found, f)
		}
	}
	return found, cmd.ProcessState.ExitCode(), nil
}

// checkFinds waits until `watershed check` has a finding with a text for each check of want, and exit code 1. It
// returns the problem of a finding.
func checkFinds(t *testing.T, args []string, want map[string]string) (problem string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error {
		found, code, err := runCheck(t, args...)
		if err != nil {
			return err
		}
		for check, text := range want {
			i := slices.IndexFunc(found, func(f finding) bool {
				return f.Check == check && strings.Contains(f.Problem, text) && f.Remedy != "" && f.Docs != ""
			})
			if i < 0 {
				return fmt.Errorf("%s: nothing has %q: %+v", check, text, found)
			}
			problem = found[i].Problem
		}
		if code != 1 {
			return fmt.Errorf("exit code %d", code)
		}
		return nil
	})
	return problem
}

// isOfMachine reports whether a finding is a warning about this machine: its disk is almost full, or it is busy.
func isOfMachine(f finding) bool {
	return f.Level == "warning" &&
		(f.Check == "disks" || f.Check == "etcd" && strings.HasPrefix(f.Problem, "a linearizable read of etcd"))
}

// checkIsClean waits until `watershed check` has no finding. It ignores isOfMachine.
func checkIsClean(t *testing.T, args ...string) {
	t.Helper()
	checkFindsOnly(t, isOfMachine, args...)
}

// checkFindsOnly waits until `watershed check` has exit code 0, and no finding that ignored rejects.
func checkFindsOnly(t *testing.T, ignored func(finding) bool, args ...string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error {
		found, code, err := runCheck(t, args...)
		found = slices.DeleteFunc(found, ignored)
		if err != nil || code != 0 || len(found) > 0 {
			return fmt.Errorf("exit code %d: %+v (%v)", code, found, err)
		}
		return nil
	})
}

// setProcess changes a line of the configuration of a process of split, and kills the process, which starts again.
func setProcess(t *testing.T, s *harness.Server, process, name, value string) {
	t.Helper()
	file := filepath.Join(s.Dir, "config", process+".yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^` + name + `: .*\n`)
	changed := line.ReplaceAllString(string(text), "") + name + ": " + value + "\n"
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	kill(t, filepath.Join(s.Dir, process+".pid"))
}

// TestCheckFindsPlantedFaults plants faults in a running split in succession, and `watershed check` finds each.
// TestCheckFindsMixedVersions plants another.
func TestCheckFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	cert, key := expired(t, dir)
	small := filepath.Join(dir, "nats-2")
	unmounted := mountSmall(t, small, 64)
	s := harness.Split(t, dir, "--replicas=watchfanout=3,etcd=3,nats=3", "--proxy-client-cert-file="+cert,
		"--proxy-client-key-file="+key)
	through, local := []string{"--kubeconfig", s.Kubeconfig}, []string{"--data-dir", dir}
	harness.Eventually(t, harness.Soon, func() error { // only the certificate that the split started with
		found, _, err := runCheck(t, through...)
		found = slices.DeleteFunc(found, isOfMachine)
		if slices.ContainsFunc(found, func(f finding) bool { return f.Check != "certificates" }) || len(found) == 0 {
			return fmt.Errorf("%+v (%v)", found, err)
		}
		return nil
	})
	stop := func(names ...string) {
		for _, name := range names {
			freeze(t, pid(t, s, name))
		}
	}
	authn, etcd := pid(t, s, "authn-0"), pid(t, s, "etcd-0")
	for _, fault := range []struct {
		name, check, text string
		// find are the flags that find the fault. A gateway may refuse requests while etcd has no quorum.
		find  []string
		plant func() error
	}{
		{"expired certificate", "certificates", cert, through, nil},
		{"dead webhook", "webhooks", "Service default/gone does not exist", through, func() error {
			applyDeadServers(t, s)
			return nil
		}},
		{"dead webhook of a URL", "webhooks", "127.0.0.1:1/review) does not respond: the last call", through, nil},
		{"dead APIService", "apiservices", "v1.dead.example.com", through, nil},
		{"wrong CA", "ca", "do not accept each other's certificates", through, func() error {
			setProcess(t, s, "watchfanout-0", "rpc-ca-file", filepath.Join(dir, "pki", "ca.crt"))
			return nil
		}},
		{"lagging replica", "watch-tier", "revisions behind etcd", through, func() error {
			setProcess(t, s, "watchfanout-1", "nats-url", "tls://127.0.0.1:1")
			return nil
		}},
		{"flag drift", "flags", "--watch-progress-period differs", through, func() error {
			setProcess(t, s, "watchfanout-2", "watch-progress-period", "3s")
			return nil
		}},
		{"skewed clock", "clocks", fmt.Sprintf("/%d differs by 1", authn), through, func() error { // 1200 s
			return tamper.SetClock(authn, 20*time.Minute)
		}},
		{"skewed clock of etcd", "clocks", fmt.Sprintf("/%d differs by -1", etcd), through, func() error {
			return tamper.SetClock(etcd, -20*time.Minute)
		}},
		{"full disk", "disks", small + " (--data-dir of nats", through, func() error {
			if unmounted != nil {
				return unmounted
			}
			return fillUpTo(small, 4<<20)
		}},
		{"alarm NOSPACE", "etcd", "has the alarm NOSPACE", through, func() error {
			noSpace(t, etcdClient(t, etcdOf(t, s)), etcdserverpb.AlarmRequest_ACTIVATE)
			return nil
		}},
		{"no quorum of NATS", "event-log", "NATS has no quorum: 1 of 3 servers run", through, func() error {
			stop("nats-0", "nats-1")
			return nil
		}},
		{"stopped NATS", "event-log", "does not reach the event log", through, func() error {
			stop("nats-2")
			return nil
		}},
		{"no quorum of etcd", "etcd", "has no quorum and no leader", local, func() error {
			stop("etcd-0", "etcd-1")
			return nil
		}},
	} {
		if fault.plant != nil {
			switch err := fault.plant(); {
			case errors.Is(err, errors.ErrUnsupported), errors.Is(err, syscall.EPERM):
				t.Logf("%s: not planted: %v", fault.name, err)
				continue
			case err != nil:
				t.Fatalf("%s: %v", fault.name, err)
			}
		}
		t.Logf("%s: %s", fault.name, checkFinds(t, fault.find, map[string]string{fault.check: fault.text}))
	}
}

// applyDeadServers applies webhooks and an APIService without a server, and waits until admission calls a webhook.
func applyDeadServers(t *testing.T, s *harness.Server) {
	t.Helper()
	s.Apply(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: dead}
webhooks:
- name: service.dead.example.com
  clientConfig: {service: {name: gone, namespace: default}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [podtemplates]}]
  admissionReviewVersions: [v1]
  sideEffects: None
- name: url.dead.example.com
  clientConfig: {url: "https://127.0.0.1:1/review"}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}
  admissionReviewVersions: [v1]
  sideEffects: None
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.dead.example.com}
spec: {group: dead.example.com, version: v1, groupPriorityMinimum: 100, versionPriority: 100,
  service: {name: gone, namespace: default}}
`)
	harness.Eventually(t, harness.Soon, func() error { // rejected once admission has read the configuration
		if _, err := s.TryKubectl("", "create", "configmap", "x", "--dry-run=server"); err == nil {
			return errors.New("the create was accepted")
		}
		return nil
	})
}

// fillUpTo writes a file into a directory, so that its file system has free bytes left.
func fillUpTo(dir string, free uint64) error {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "filler"), make([]byte, st.Bavail*uint64(st.Bsize)-free), 0o600)
}

// TestCheckFindsMixedVersions replaces the binary of a running split by another release, and kills a process.
func TestCheckFindsMixedVersions(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	program := filepath.Join(dir, "watershed")
	binary, err := os.ReadFile(harness.Watershed())
	if err != nil {
		t.Fatal(err)
	}
	// A file that this process writes cannot be executed while a child of a parallel test has inherited its descriptor.
	if out, err := exec.Command("cp", harness.Watershed(), program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// "watershed RELEASE (Kubernetes …" or "watershed RELEASE, …"
	out, err := exec.Command(program, "version").Output()
	if err != nil {
		t.Fatal(err)
	}
	release := strings.Trim(strings.Fields(string(out))[1], ",")
	harness.Start(t, dir, "split", program, "split", "--data-dir", dir, "--bind-address", "127.0.0.1",
		"--secure-port", fmt.Sprint(porttest.FreePort(t)))
	checkIsClean(t, "--data-dir", dir)
	other := bytes.ReplaceAll(binary, []byte(release), bytes.Repeat([]byte("x"), len(release)))
	if err := os.WriteFile(program+".new", other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(program+".new", program); err != nil {
		t.Fatal(err)
	}
	kill(t, filepath.Join(dir, "watchfanout-1.pid"))
	checkFinds(t, []string{"--kubeconfig", filepath.Join(dir, "admin.kubeconfig"), "--fail-on=warning"},
		map[string]string{"versions": "have 2 versions"})
}

// etcdClient returns a client that is closed at the end of the test.
func etcdClient(t *testing.T, c clientv3.Config) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// noSpace raises or disarms the alarm NOSPACE.
func noSpace(t *testing.T, client *clientv3.Client, action etcdserverpb.AlarmRequest_AlarmAction) {
	t.Helper()
	members, err := client.MemberList(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcdserverpb.NewMaintenanceClient(client.ActiveConnection()).Alarm(t.Context(),
		&etcdserverpb.AlarmRequest{Action: action, Alarm: etcdserverpb.AlarmType_NOSPACE,
			MemberID: members.Members[0].ID}); err != nil {
		t.Fatal(err)
	}
}

// expired returns a client certificate that has ended, and its key.
func expired(t *testing.T, dir string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "front-proxy-client"},
		NotBefore: time.Now().AddDate(-1, 0, 0), NotAfter: time.Now().AddDate(0, 0, -1)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "expired.crt"), filepath.Join(dir, "expired.key")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: cert},
		keyFile:  {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// TestCheckOfUp checks `up` by its kubeconfig, its directory and debug sockets, and an etcd without a quorum by flags.
// A user of system:monitoring may check it, and another user may not. The probe ends without a breach.
func TestCheckOfUp(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	checkIsClean(t, "--kubeconfig", s.Kubeconfig)
	checkIsClean(t, "--data-dir", s.Dir, "--deep")
	monitoring := s.Identity("m", "system:monitoring")
	checkFindsOnly(t, func(f finding) bool { // of system:monitoring, which may not list webhooks
		return f.Level == "skipped" || isOfMachine(f)
	}, "--kubeconfig", monitoring)
	checkFinds(t, []string{"--kubeconfig", s.Identity("x")}, map[string]string{"processes": "403"})
	if code, body := s.Get("/metrics?view=processes"); code != http.StatusOK || !strings.Contains(body, `"services"`) {
		t.Errorf("%d %s", code, body)
	}
	checkFinds(t, []string{"--kubeconfig", s.Kubeconfig, "--etcd-servers", loneMember(t)},
		map[string]string{"etcd": "has no quorum and no leader"})
	harness.Eventually(t, harness.Soon, func() error { // a busy machine may exceed the bounds
		out, err := exec.Command(harness.Watershed(), "probe", "--data-dir", s.Dir, "--once", "-o", "json",
			"--max-event-age=10s", "--max-write-latency=10s").CombinedOutput()
		var result struct{ Writes, Events, Missing int }
		if jerr := json.Unmarshal(out, &result); err != nil || jerr != nil || result.Writes != 20 ||
			result.Events != 20 {
			return fmt.Errorf("probe: %v, %v\n%s", err, jerr, out)
		}
		return nil
	})
	if out, err := exec.Command(harness.Watershed(), "probe", "--data-dir", s.Dir, "--once",
		"--max-event-age=1ns").CombinedOutput(); err == nil || !strings.Contains(string(out), "--max-event-age") {
		t.Errorf("a breach: %v\n%s", err, out)
	}
}

// TestCheckBeforeAnInstallation checks this machine before `up`, and a cluster before the manifests.
func TestCheckBeforeAnInstallation(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	port := porttest.FreePort(t)
	config := filepath.Join(dir, "up.yaml")
	text := fmt.Appendf(nil, "bind-address: 127.0.0.1\nsecure-port: %d\n", port)
	if err := os.WriteFile(config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	machine := []string{"--pre", "--config", config, "--data-dir", data}
	checkFindsOnly(t, func(f finding) bool { // of this machine
		return f.Level == "warning" && slices.Contains([]string{"disks", "limits", "clocks"}, f.Check)
	}, machine...)
	if err := os.Mkdir(data, 0o700); err != nil { // harness writes its log into the directory
		t.Fatal(err)
	}
	s := harness.Up(t, data, fmt.Sprintf("--secure-port=%d", port))
	checkFinds(t, append(machine, "--etcd-servers="+loneMember(t), "--client-ca-file="+s.Kubeconfig+".gone"),
		map[string]string{
			"ports":        "address already in use",
			"data-dir":     "in use by a running `up` or `split`",
			"etcd":         "has no quorum and no leader",
			"certificates": "no such file",
		})

	s.Apply(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: fast}
provisioner: example.com/none
`)
	cluster := []string{"--pre", "--kubeconfig", s.Kubeconfig}
	checkFindsOnly(t, func(finding) bool { return false }, append(cluster, "--storage-class=fast")...)
	s.Kubectl("create", "namespace", "watershed")
	s.Kubectl("-n", "watershed", "create", "service", "clusterip", "etcd", "--tcp=1")
	s.Kubectl("create", "priorityclass", "watershed", "--value=1")
	s.Apply(`
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: node-1, namespace: kube-node-lease}
spec: {holderIdentity: node-1, renewTime: "2999-01-01T00:00:00.000000Z"}
`)
	checkFinds(t, cluster, map[string]string{
		"clocks":    "the node node-1 is ahead",
		"namespace": "the namespace watershed has Service/etcd",
		"storage":   "no default StorageClass for the volumes of etcd: fast",
	})
	checkFinds(t, []string{"--pre", "--kubeconfig", s.Identity("x")}, map[string]string{
		"permissions": "may not create namespaces; create priorityclasses.scheduling.k8s.io; create serviceaccounts",
	})
}

// loneMember starts a cluster of three members, stops two, and returns the URL of the third.
func loneMember(t *testing.T) (url string) {
	t.Helper()
	names, peers, initial := []string{"a", "b", "c"}, map[string]string{}, []string{}
	for _, n := range names {
		peers[n] = fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))
		initial = append(initial, n+"="+peers[n])
	}
	members := map[string]*harness.Process{}
	for _, n := range names {
		dir := harness.TempDir(t)
		url = fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))
		members[n] = harness.Start(t, dir, "etcd", harness.Peer("etcd"), "--name", n,
			"--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", url, "--advertise-client-urls", url,
			"--listen-peer-urls", peers[n], "--initial-advertise-peer-urls", peers[n],
			"--initial-cluster", strings.Join(initial, ","), "--log-level", "error")
	}
	harness.Eventually(t, harness.Soon, func() error {
		resp, err := http.Get(url + "/health")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				err = fmt.Errorf("%s", resp.Status)
			}
		}
		return err
	})
	members["a"].Stop()
	members["b"].Stop()
	return url
}

// TestStatusOfCompact lists every process of compact through a gateway: both fronts, etcd, NATS and xds. With --deep,
// each replica of the watch tier compares its objects with etcd's.
func TestStatusOfCompact(t *testing.T) {
	t.Parallel()
	s := harness.Compact(t, "")
	checkIsClean(t, "--kubeconfig", s.Kubeconfig, "--deep")
	compared := regexp.MustCompile(`(?m)^ok +objects +2 replicas have compared [1-9]\d* objects of [1-9]\d* resources`)
	harness.Eventually(t, harness.Soon, func() error { // a replica may be behind
		out, err := exec.Command(harness.Watershed(), "check", "--kubeconfig", s.Kubeconfig, "--deep").CombinedOutput()
		if !compared.Match(out) {
			return fmt.Errorf("%v\n%s", err, out)
		}
		return nil
	})
	harness.Eventually(t, harness.Soon, func() error { // the other front's report comes with its next heartbeat
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, harness.Watershed(), "status",
			"--kubeconfig", s.Kubeconfig).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		fronts := regexp.MustCompile(`(?m)^\S+ +registry,authn,authz,admission,gateway .* true `).FindAll(out, -1)
		replicas := regexp.MustCompile(`(?m)^\S+ +watchfanout .* true `).FindAll(out, -1)
		programs := regexp.MustCompile(`(?m)^\S+ +(etcd|nats|xds) .* true +\d+s +\d+\.\d MB `).FindAll(out, -1)
		if len(fronts) != 2 || len(replicas) != 2 || len(programs) != 3 || !strings.Contains(string(out), "PUBLISHES") {
			return fmt.Errorf("%d fronts, %d replicas, %d programs:\n%s", len(fronts), len(replicas), len(programs),
				out)
		}
		return nil
	})
}
