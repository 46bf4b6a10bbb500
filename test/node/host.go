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
)

const (
	// Name is the name of the node that is this machine.
	Name = "real-1"
	// Address is this machine's address on the bridge. Pods reach the API server at this address.
	Address = "10.99.0.1"
	bridge  = "watershed0"
)

// Host is a node's machine: this machine, or a network namespace of it with an address on the bridge.
type Host struct {
	// Name is the node's name, and Address its address.
	Name, Address string
	// pods is the range of its pods' addresses.
	pods string
	// namespace is the network namespace, and link its end of the bridge. Both are empty for this machine.
	namespace, link string
}

// machine is this machine as a host.
var machine = &Host{Name: Name, Address: Address, pods: "10.244.77.0/24"}

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

// Hosts creates n hosts, which are network namespaces on the bridge. Their pods reach each other and this machine by
// routes, without translation of addresses.
func Hosts(t testing.TB, n int) []*Host {
	t.Helper()
	var all []*Host
	for i := 1; i <= n; i++ {
		h := &Host{
			Name:      fmt.Sprintf("host-%d", i),
			Address:   fmt.Sprintf("10.99.0.%d", 10+i),
			pods:      fmt.Sprintf("10.244.%d.0/24", 100+i),
			namespace: fmt.Sprintf("watershed-host-%d", i),
			link:      fmt.Sprintf("watershed-%d", i),
		}
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", h.namespace).Run() })
		run(t, "ip", "netns", "add", h.namespace)
		run(t, "ip", "link", "add", h.link, "type", "veth", "peer", "name", "eth0", "netns", h.namespace)
		run(t, "ip", "link", "set", h.link, "master", bridge, "up")
		run(t, "ip", "-n", h.namespace, "addr", "add", h.Address+"/24", "dev", "eth0")
		run(t, "ip", "-n", h.namespace, "link", "set", "eth0", "up")
		run(t, "ip", "-n", h.namespace, "link", "set", "lo", "up")
		run(t, "ip", "-n", h.namespace, "route", "add", "default", "via", Address)
		run(t, "ip", "route", "add", h.pods, "via", h.Address)
		all = append(all, h)
	}
	for _, h := range all {
		for _, other := range all {
			if other != h {
				run(t, "ip", "-n", h.namespace, "route", "add", other.pods, "via", other.Address)
			}
		}
	}
	return all
}

// command returns the command line that runs a program in the host's network.
func (h *Host) command(program string, args ...string) (string, []string) {
	if h.namespace == "" {
		return program, args
	}
	return "nsenter", append([]string{"--net=/run/netns/" + h.namespace, program}, args...)
}

// cgroup is the parent of the cgroup of the host's pods.
func (h *Host) cgroup() string { return "/" + h.namespace }

// cgroups are the directories of the pods' cgroups, with cgroup v2 and v1.
func (h *Host) cgroups() (all []string) {
	for _, root := range append(must(filepath.Glob("/sys/fs/cgroup/*")), "/sys/fs/cgroup") {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err == nil {
			all = append(all, filepath.Join(root, h.cgroup()))
		}
	}
	return all
}

// sweep ends the processes that outlive containerd, which has its files in dir, and unmounts kubelet's mounts.
func (h *Host) sweep(dir string) {
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
	h.endPods()
	mounts, _ := os.ReadFile("/proc/mounts")
	lines := strings.Split(string(mounts), "\n")
	for i := len(lines) - 1; i >= 0; i-- { // innermost first
		if fields := strings.Fields(lines[i]); len(fields) > 1 && strings.HasPrefix(fields[1], dir) {
			_ = syscall.Unmount(fields[1], syscall.MNT_DETACH)
		}
	}
	if h.namespace != "" {
		return
	}
	_ = exec.Command("ip", "link", "del", "watershed1").Run()
	for _, tables := range []string{"iptables", "ip6tables"} { // rules of kube-proxy and of the CNI plugins
		const text = "%[1]s-save | grep -v 'KUBE-\\|CNI-' | %[1]s-restore"
		_ = exec.Command("sh", "-c", fmt.Sprintf(text, tables)).Run()
	}
}

// endPods kills the processes in the cgroups of the host's pods, and removes these cgroups.
func (h *Host) endPods() {
	var groups []string
	for _, g := range h.cgroups() {
		groups = append(groups, filepath.Join(g, "kubepods"))
	}
	list := strings.Join(groups, " ")
	procs := exec.Command("sh", "-c", "find "+list+" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u")
	for _, pid := range strings.Fields(string(output(procs))) {
		if n, err := strconv.Atoi(pid); err == nil {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
	for range 50 { // a killed process leaves its cgroup with a delay
		if exec.Command("sh", "-c",
			"for g in "+list+"; do ! test -d $g || find $g -depth -type d -exec rmdir {} + || exit 1; done").
			Run() ==
			nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func output(c *exec.Cmd) []byte { out, _ := c.Output(); return out }

func must(all []string, _ error) []string { return all }
