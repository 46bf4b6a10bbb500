package cluster

import (
	"cmp"
	"flag"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"testing"

	"watershed.dev/test/harness"
)

var (
	released = flag.String("release", "", "the directory of a release: this machine becomes a node (as root)")
	before   = flag.String("release-from", "", "the directory of the release to upgrade from; empty: the same")
	overlaid = flag.String("chart-overlay", "dev", "the chart's overlay: dev on this machine as a node, or compact or ha "+
		"on three network namespaces of it")
)

// release returns the chart and the images of a release.
func release(t *testing.T, dir string) (chart string, archives []string) {
	t.Helper()
	charts, _ := filepath.Glob(filepath.Join(dir, "watershed-*.tgz"))
	archives, _ = filepath.Glob(filepath.Join(dir, "*.tar"))
	if len(charts) != 1 || len(archives) == 0 {
		t.Fatalf("release %q: %d charts, %d images: `make release` builds them", dir, len(charts), len(archives))
	}
	return charts[0], archives
}

// TestTheReleaseOnANode installs the chart of a release on a real node, or on three, and upgrades it while clients
// watch and write. The chart's own test runs after each. The nodes have the images of the releases from their tar
// files, by the digests in the charts.
func TestTheReleaseOnANode(t *testing.T) {
	if *released == "" {
		t.Skip("it makes this machine a node, as root, and takes what `make release` builds: run `make e2e-release`")
	}
	chart, archives := release(t, cmp.Or(*before, *released))
	next, later := release(t, *released)
	hosts, placement, changed := 3, "split", "gateway"
	values := []string{"--set", "overlay=" + *overlaid}
	switch *overlaid {
	case "dev":
		hosts, values = 0, append(values, "--set", "omit={Deployment/jaeger,Service/jaeger}")
	case "compact":
		placement, changed = "compact", "front"
	case "ha":
	default:
		t.Fatalf("-chart-overlay %s: want dev, compact or ha", *overlaid)
	}
	h := &hosted{report: newReport(t), placement: placement}
	h.host(hosts, append(archives, later...), "coredns")
	helm := func(args ...string) {
		t.Helper()
		args = append([]string{"--kubeconfig", h.outer.Kubeconfig, "--namespace", "watershed"}, args...)
		out, err := exec.Command(harness.Peer("helm"), args...).CombinedOutput()
		if err != nil {
			pods, _ := h.outer.TryKubectl("", "-n", "watershed", "get", "pods,jobs,events")
			t.Fatalf("helm %v: %v\n%s\n%s", args, err, out, pods)
		}
		fmt.Printf("%s\n", out)
	}
	wait := []string{"--wait", "--timeout", "4m"}
	helm(append(append([]string{"install", "watershed", chart, "--create-namespace"}, values...), wait...)...)
	helm("test", "watershed", "--logs")
	h.connect()
	address := func() string { return h.inner.Host }
	if hosts > 0 {
		b := h.balance()
		address = func() string {
			address, _, err := b.gateway()
			if err != nil {
				t.Fatal(err)
			}
			return "https://" + net.JoinHostPort(address, "6443")
		}
	}
	inner := filepath.Join(h.outer.Dir, "inner.kubeconfig")
	kubectl := func(args ...string) string {
		t.Helper()
		server := []string{"--kubeconfig", inner, "--server", address(), "--tls-server-name", h.inner.ServerName}
		args = append(server, args...)
		out, err := exec.Command(harness.Peer("kubectl"), args...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	kubectl("create", "configmap", "kept", "--from-literal=a=b")
	if *overlaid == "dev" {
		values = append(values, "--set", "workloads.gateway.replicas=2")
	}
	values = append(values, "--set-json", "workloads."+changed+`.args=["--v=1"]`)
	c, err := start(t.Context(), h.inner, 20, writePause)
	if err != nil {
		t.Fatal(err)
	}
	// A single NATS loses its log. Watchers list once if no registry that has read it still runs.
	h.phase(c, "helm upgrade", hosts > 0, func() {
		helm(append(append([]string{"upgrade", "watershed", next}, values...), wait...)...)
	})
	for _, w := range c.stop() {
		t.Error(w)
	}
	h.table.Flush()
	helm("test", "watershed", "--logs")
	if got := kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}"); got != "b" {
		t.Errorf("after the upgrade, the ConfigMap has %q", got)
	}
	fmt.Println(kubectl("version"))
	fmt.Println(h.outer.Kubectl("-n", "watershed", "get", "pods", "-o", "wide"))
}
