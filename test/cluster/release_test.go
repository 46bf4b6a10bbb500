package cluster

import (
	"cmp"
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"watershed.dev/test/harness"
)

var (
	released = flag.String("release", "", "the directory of a release: this machine becomes a node (as root)")
	before   = flag.String("release-from", "", "the directory of the release to upgrade from; empty: the same")
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

// TestTheReleaseOnANode installs the chart of a release on a real node, and upgrades it while clients watch and write.
// The chart's own test runs after each. The node has the images of the releases from their tar files, by the digests
// in the charts.
func TestTheReleaseOnANode(t *testing.T) {
	if *released == "" {
		t.Skip("it makes this machine a node, as root, and takes what `make release` builds: run `make e2e-release`")
	}
	chart, archives := release(t, cmp.Or(*before, *released))
	next, later := release(t, *released)
	h := &hosted{report: newReport(t), placement: "split"}
	h.host(0, append(archives, later...), "coredns")
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
	wait := []string{"--wait", "--timeout", "2m"}
	values := []string{"--set", "overlay=dev", "--set", "omit={Deployment/jaeger,Service/jaeger}"}
	helm(append(append([]string{"install", "watershed", chart, "--create-namespace"}, values...), wait...)...)
	helm("test", "watershed", "--logs")
	h.connect()
	inner := filepath.Join(h.outer.Dir, "inner.kubeconfig")
	kubectl := func(args ...string) string {
		t.Helper()
		server := []string{"--kubeconfig", inner, "--server", h.inner.Host, "--tls-server-name", h.inner.ServerName}
		args = append(server, args...)
		out, err := exec.Command(harness.Peer("kubectl"), args...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	kubectl("create", "configmap", "kept", "--from-literal=a=b")
	values = append(values, "--set", "workloads.gateway.replicas=2", "--set-json", `workloads.registry.args=["--v=1"]`)
	c, err := start(t.Context(), h.inner, 20, writePause)
	if err != nil {
		t.Fatal(err)
	}
	// NATS loses its only log. Watchers list once if no registry that has read it still runs.
	h.phase(c, "helm upgrade", false, func() {
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
