// Package node makes this machine, or network namespaces of it, nodes of an API server of the harness. A node runs
// containerd, kubelet and kube-proxy from their modules, with images that the package builds itself. It requires root,
// and installs Debian's runc, CNI plugins, iptables and busybox.
package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/test/harness"
)

// Options are a test's requirements for the node, beyond the requirements of the upstream suite.
type Options struct {
	// Host is the node's host. If it is nil, the node is this machine.
	Host *Host
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

func run(t testing.TB, command string, args ...string) {
	t.Helper()
	if out, err := exec.Command(command, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", command, strings.Join(args, " "), err, out)
	}
}

// Node is a running node.
type Node struct {
	*Host
	t         testing.TB
	server    *harness.Server
	dir       string
	processes []*harness.Process
}

func (n *Node) socket() string { return filepath.Join(n.dir, "containerd.sock") }

// Import imports a tar file of images into the node's containerd.
func (n *Node) Import(t testing.TB, archive string) {
	t.Helper()
	run(t, harness.Peer("ctr"), "-a", n.socket(), "-n", "k8s.io", "images", "import", archive)
}

// write writes a file of the node, and returns its path.
func (n *Node) write(name, text string) string {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// Join starts the node, which ends with the test.
func Join(t testing.TB, s *harness.Server, o Options) *Node {
	t.Helper()
	if o.Host == nil {
		o.Host = machine
	}
	n := &Node{Host: o.Host, t: t, server: s, dir: harness.TempDir(t)}
	n.write("cni/10-bridge.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"watershed","plugins":[
{"type":"bridge","bridge":"watershed1","isGateway":true,"ipMasq":%t,"hairpinMode":true,
"ipam":{"type":"host-local","dataDir":"%s/ipam","ranges":[[{"subnet":"%s"}]],
"routes":[{"dst":"0.0.0.0/0"}]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}`, n.namespace == "", n.dir, n.pods))
	n.write("containerd.toml", fmt.Sprintf(`
version = 3
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
  address = %[2]q
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "registry.k8s.io/pause:3.10"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "%[1]s/cni"
`, n.dir, n.socket()))
	serving, key := s.ServingCertificate("kubelet-"+n.Name, n.Name, n.Address)
	n.write("kubelet.yaml", fmt.Sprintf(`
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: %[8]s
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
localStorageCapacityIsolation: %[9]t
resolvConf: /etc/resolv.conf
podLogsDir: %[1]s/podlogs
maxPods: 200
`, n.dir, n.socket(), s.CA+".crt", n.Address, dnsOf(o), serving, key, n.cgroup(), n.namespace != ""))
	t.Setenv("PATH", filepath.Dir(harness.Peer("containerd"))+":"+
		os.Getenv("PATH")) // containerd finds its shim there
	t.Cleanup(func() {
		n.sweep(n.dir)
		for _, g := range n.cgroups() {
			if n.namespace != "" {
				_ = os.Remove(g)
			}
		}
	})
	n.containerd()
	for _, path := range o.Archives {
		n.Import(t, path)
	}
	for _, i := range images(t, o) {
		archive, err := i.archive()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(n.dir, "image.tar")
		if err := os.WriteFile(path, archive, 0o600); err != nil {
			t.Fatal(err)
		}
		n.Import(t, path)
	}
	n.kubelet()
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "node", n.Name)
		if err != nil || !strings.Contains(out, " Ready ") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	return n
}

// start starts a process of the node in the host's network.
func (n *Node) start(name string, args ...string) {
	n.t.Helper()
	program, args := n.command(harness.Peer(name), args...)
	n.processes = append(n.processes, harness.Start(n.t, n.dir, name, program, args...))
}

// containerd starts containerd, and waits until it responds.
func (n *Node) containerd() {
	n.t.Helper()
	n.start("containerd", "-c", filepath.Join(n.dir, "containerd.toml"))
	harness.Eventually(n.t, harness.Soon, func() error {
		return exec.Command(harness.Peer("ctr"), "-a", n.socket(), "version").Run()
	})
}

// kubelet starts kubelet and kube-proxy.
func (n *Node) kubelet() {
	n.t.Helper()
	for _, g := range n.cgroups() {
		if err := os.MkdirAll(g, 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
	n.start("kubelet", "--config", filepath.Join(n.dir, "kubelet.yaml"),
		"--kubeconfig", n.identity("system:node:"+n.Name, "system:nodes"),
		"--hostname-override", n.Name, "--root-dir", filepath.Join(n.dir, "kubelet"),
		"--node-ip", n.Address, "--cert-dir", filepath.Join(n.dir, "pki"))
	n.start("kube-proxy",
		"--kubeconfig", n.identity("system:kube-proxy"), "--proxy-mode", "iptables", "--cluster-cidr", "10.244.0.0/16",
		"--hostname-override", n.Name, "--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0",
		"--conntrack-tcp-timeout-close-wait", "0")
}

// identity returns the path of a kubeconfig with the API server's address that the host's network reaches.
func (n *Node) identity(user string, groups ...string) string {
	n.t.Helper()
	path := n.server.Identity(user, groups...)
	if n.namespace == "" {
		return path
	}
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server = fmt.Sprintf("https://%s:%s", Address, c.Server[strings.LastIndex(c.Server, ":")+1:])
	}
	path = filepath.Join(n.dir, filepath.Base(path))
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// Disconnect cuts the host's link. Packets in both directions are lost, as with a broken switch.
func (n *Node) Disconnect() {
	n.t.Helper()
	run(n.t, "ip", "link", "set", n.link, "down")
}

// Connect restores the host's link.
func (n *Node) Connect() {
	n.t.Helper()
	run(n.t, "ip", "link", "set", n.link, "up")
}

// PowerOff ends the host as a loss of power does. No peer receives the end of a connection. The disks remain, with
// everything that was written to them.
func (n *Node) PowerOff() {
	n.t.Helper()
	n.Disconnect()
	for _, p := range n.processes {
		p.Kill()
	}
	n.processes = nil
	n.sweep(n.dir)
	if err := os.RemoveAll(filepath.Join(n.dir, "state")); err != nil {
		n.t.Fatal(err)
	}
}

// PowerOn starts the host again.
func (n *Node) PowerOn() {
	n.t.Helper()
	n.Connect()
	n.containerd()
	n.kubelet()
}

// dnsOf returns the DNS line of kubelet's configuration.
func dnsOf(o Options) string {
	if o.DNS == "" {
		return ""
	}
	return "clusterDNS: [" + o.DNS + "]"
}
