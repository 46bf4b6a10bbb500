// Package node makes this machine a node of an API server of the harness. It runs containerd, kubelet and kube-proxy
// from their modules, with images that it builds itself. It requires root, and installs Debian's runc, CNI plugins,
// iptables and busybox.
package node

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"watershed.dev/test/harness"
)

const (
	// Name is the node's name.
	Name = "real-1"
	// Address is the node's address, on its own bridge. Pods reach the API server at this address.
	Address = "10.99.0.1"
	bridge  = "watershed0"
	pods    = "10.244.77.0/24"
)

// Options are a test's requirements for the node, beyond the requirements of the upstream suite.
type Options struct {
	// DNS is the address of the cluster's DNS. If it is empty, pods get the machine's resolv.conf.
	DNS string
	// Archives are tar files of images. Programs maps an image's name to the static binary that it is built from.
	Archives []string
	Programs map[string]string
	// Lean leaves out the suite's images, except pause.
	Lean bool
}

// Flags returns the flags that an API server needs for the node.
func Flags() []string {
	return []string{"--kubelet-preferred-address-types=InternalIP", "--enable-aggregator-routing",
		"--advertise-address=" + Address}
}

// Prepare creates the bridge. An API server that pods must reach starts after it.
func Prepare(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a real node needs root")
	}
	for command, pkg := range map[string]string{
		"runc":                "runc",
		"/usr/lib/cni/bridge": "containernetworking-plugins",
		"iptables":            "iptables",
		"/bin/busybox":        "busybox-static",
	} {
		if _, err := exec.LookPath(command); err != nil {
			run(t, "apt-get", "install", "-y", "--no-install-recommends", pkg)
		}
	}
	if _, err := net.InterfaceByName(bridge); err != nil {
		run(t, "ip", "link", "add", bridge, "type", "bridge")
		run(t, "ip", "addr", "add", Address+"/24", "dev", bridge)
	}
	run(t, "ip", "link", "set", bridge, "up")
	const forwards = "/proc/sys/net/ipv4/ip_forward" // the CNI plugins set it
	before, _ := os.ReadFile(forwards)
	t.Cleanup(func() {
		_ = exec.Command("ip", "link", "del", bridge).Run()
		_ = os.WriteFile(forwards, before, 0o644)
	})
}

func run(t testing.TB, command string, args ...string) {
	t.Helper()
	if out, err := exec.Command(command, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", command, strings.Join(args, " "), err, out)
	}
}

// Node is a running node.
type Node struct{ socket string }

// Import imports a tar file of images into the node's containerd.
func (n *Node) Import(t testing.TB, archive string) {
	t.Helper()
	run(t, harness.Peer("ctr"), "-a", n.socket, "-n", "k8s.io", "images", "import", archive)
}

// Join starts the node, which ends with the test.
func Join(t testing.TB, s *harness.Server, o Options) *Node {
	t.Helper()
	dir := harness.TempDir(t)
	socket := filepath.Join(dir, "containerd.sock")
	n := &Node{socket}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("cni/10-bridge.conflist", `{"cniVersion":"1.0.0","name":"watershed","plugins":[
{"type":"bridge","bridge":"watershed1","isGateway":true,"ipMasq":true,"hairpinMode":true,
"ipam":{"type":"host-local","dataDir":"`+dir+`/ipam","ranges":[[{"subnet":"`+pods+`"}]],
"routes":[{"dst":"0.0.0.0/0"}]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}`)
	config := write("containerd.toml", fmt.Sprintf(`
version = 3
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
  address = %[2]q
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "registry.k8s.io/pause:3.10"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "%[1]s/cni"
`, dir, socket))
	serving, key := s.ServingCertificate("kubelet", Name, Address)
	kubelet := write("kubelet.yaml", fmt.Sprintf(`
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://%[2]s
tlsCertFile: %[6]q
tlsPrivateKeyFile: %[7]q
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[3]q}}
authorization: {mode: Webhook}
clusterDomain: cluster.local
%[5]s
address: %[4]s
healthzPort: 0
evictionHard: {memory.available: 50Mi, nodefs.available: 1%%, imagefs.available: 1%%}
imageGCHighThresholdPercent: 100
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
resolvConf: /etc/resolv.conf
podLogsDir: %[1]s/podlogs
maxPods: 200
`, dir, socket, s.CA+".crt", Address, dnsOf(o), serving, key))
	t.Cleanup(func() { sweep(dir) })
	t.Setenv("PATH", filepath.Dir(harness.Peer("containerd"))+":"+
		os.Getenv("PATH")) // containerd finds its shim there
	harness.Start(t, dir, "containerd", harness.Peer("containerd"), "-c", config)
	harness.Eventually(t, 30*time.Second, func() error {
		return exec.Command(harness.Peer("ctr"), "-a", socket, "version").Run()
	})
	for _, path := range o.Archives {
		n.Import(t, path)
	}
	for _, i := range images(t, o) {
		archive, err := i.archive()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "image.tar")
		if err := os.WriteFile(path, archive, 0o600); err != nil {
			t.Fatal(err)
		}
		n.Import(t, path)
	}
	harness.Start(t, dir, "kubelet", harness.Peer("kubelet"), "--config", kubelet,
		"--kubeconfig", s.Identity("system:node:"+Name, "system:nodes"),
		"--hostname-override", Name, "--root-dir", filepath.Join(dir, "kubelet"),
		"--node-ip", Address, "--cert-dir", filepath.Join(dir, "pki"))
	harness.Start(t, dir, "kube-proxy", harness.Peer("kube-proxy"),
		"--kubeconfig", s.Identity("system:kube-proxy"), "--proxy-mode", "iptables", "--cluster-cidr", "10.244.0.0/16",
		"--hostname-override", Name, "--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0",
		"--conntrack-tcp-timeout-close-wait", "0")
	harness.Eventually(t, time.Minute, func() error {
		out, err := s.TryKubectl("", "get", "node", Name)
		if err != nil || !strings.Contains(out, " Ready ") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	return n
}

// dnsOf returns the DNS line of kubelet's configuration.
func dnsOf(o Options) string {
	if o.DNS == "" {
		return ""
	}
	return "clusterDNS: [" + o.DNS + "]"
}

// images returns pause, the test's own images, and the upstream suite's images.
func images(t testing.TB, o Options) []*image {
	t.Helper()
	file := func(path string) []byte {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	all := []*image{{
		tags: []string{
			"registry.k8s.io/pause:3.10",
			"registry.k8s.io/pause:3.10.1",
			"registry.k8s.io/pause:3.10.2",
		},
		entrypoint: []string{"/pause"},
		files:      map[string][]byte{"/pause": file(harness.Peer("pause"))},
	}}
	for name, path := range o.Programs {
		all = append(all, &image{
			tags:       []string{name},
			entrypoint: []string{"/" + filepath.Base(path)},
			files:      map[string][]byte{"/" + filepath.Base(path): file(path)},
		})
	}
	if o.Lean {
		return all
	}
	return append(all, suite(t)...)
}

// suite returns the upstream suite's images: its own agnhost, and busybox in place of other servers.
func suite(t testing.TB) []*image {
	t.Helper()
	file := func(path string) []byte {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	const suite = "registry.k8s.io/e2e-test-images/"
	certificates := filepath.Join(module(t, "k8s.io/kubernetes"), "test", "images", "agnhost", "porter")
	return []*image{
		{
			tags:       []string{suite + "agnhost:2.63.0", suite + "agnhost:2.55"},
			entrypoint: []string{"/agnhost"},
			cmd:        []string{"pause"},
			busybox:    true,
			files: map[string][]byte{"/agnhost": file(harness.Peer("agnhost")),
				"/localhost.crt": file(certificates + "/localhost.crt"),
				"/localhost.key": file(certificates + "/localhost.key")},
		},
		{tags: []string{suite + "busybox:1.37.0-1", suite + "nonroot:1.5"}, cmd: []string{"sh"}, busybox: true},
		{
			tags: []string{suite + "httpd:2.4.38-4", suite + "httpd:2.4.39-4", suite + "nginx:1.14-4",
				suite + "nginx:1.15-4", suite + "nginx:1.27-0", suite + "nautilus:1.8", suite + "kitten:1.8"},
			entrypoint: []string{"/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/usr/local/apache2/htdocs"},

			busybox: true,
			files: map[string][]byte{
				"/usr/local/apache2/htdocs/index.html": []byte("<html><body><h1>It works!</h1></body></html>\n"),
			},
		},
		{
			tags:       []string{suite + "sample-apiserver:1.29.2"},
			entrypoint: []string{"/kube-sample-apiserver"},
			files:      map[string][]byte{"/kube-sample-apiserver": file(harness.Peer("sample-apiserver"))},
		},
		{
			tags:       []string{"registry.k8s.io/etcd:3.6.8-0"},
			entrypoint: []string{"/usr/local/bin/etcd"},
			busybox:    true,
			files:      map[string][]byte{"/usr/local/bin/etcd": file(harness.Peer("etcd"))},
		},
		{
			tags:       []string{suite + "resource-consumer:1.14"},
			entrypoint: []string{"/consumer"},
			busybox:    true,
			files:      map[string][]byte{"/consumer": file(harness.Peer("resource-consumer"))},
		},
	}
}

func module(t testing.TB, name string) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-C", filepath.Join(harness.Root(), "test"), "-m",
		"-f", "{{.Dir}}", name).Output()
	if err != nil {
		t.Fatalf("where is %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

// sweep ends the processes that outlive containerd, and unmounts kubelet's mounts.
func sweep(dir string) {
	for _, proc := range must(filepath.Glob("/proc/[0-9]*/cmdline")) {
		line, err := os.ReadFile(proc)
		if err != nil || !strings.Contains(string(line), dir) || !strings.Contains(string(line), "containerd-shim") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(proc, "/proc/%d/cmdline", &pid); err == nil {
			_ = syscall.Kill(-pid, syscall.SIGKILL)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	endPods()
	mounts, _ := os.ReadFile("/proc/mounts")
	lines := strings.Split(string(mounts), "\n")
	for i := len(lines) - 1; i >= 0; i-- { // innermost first
		if fields := strings.Fields(lines[i]); len(fields) > 1 && strings.HasPrefix(fields[1], dir) {
			_ = syscall.Unmount(fields[1], syscall.MNT_DETACH)
		}
	}
	_ = exec.Command("ip", "link", "del", "watershed1").Run()
	for _, tables := range []string{"iptables", "ip6tables"} { // rules of kube-proxy and of the CNI plugins
		const text = "%[1]s-save | grep -v 'KUBE-\\|CNI-' | %[1]s-restore"
		_ = exec.Command("sh", "-c", fmt.Sprintf(text, tables)).Run()
	}
}

// endPods kills the processes in kubelet's cgroups, and removes these cgroups and the pods' network namespaces.
func endPods() {
	const groups = "/sys/fs/cgroup/kubepods /sys/fs/cgroup/*/kubepods" // of cgroup v2, and of v1
	procs := exec.Command("sh", "-c", "find "+groups+" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u")
	for _, pid := range strings.Fields(string(output(procs))) {
		if n, err := strconv.Atoi(pid); err == nil {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
	for _, ns := range must(filepath.Glob("/run/netns/cni-*")) {
		_ = syscall.Unmount(ns, syscall.MNT_DETACH)
		_ = os.Remove(ns)
	}
	for range 50 { // a killed process leaves its cgroup with a delay
		if exec.Command("sh", "-c",
			"for g in "+groups+"; do ! test -d $g || find $g -depth -type d -exec rmdir {} + || exit 1; done").
			Run() ==
			nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func output(c *exec.Cmd) []byte { out, _ := c.Output(); return out }

func must(all []string, _ error) []string { return all }
