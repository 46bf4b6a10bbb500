package cluster

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"watershed.dev/test/harness"
	"watershed.dev/test/node"
)

var swap = flag.Bool("swap", false, "swap on a real node (as root) instead of kwok's nodes")

// TestSwap replaces a cluster's kube-apiserver by Watershed, with the settings of `watershed migrate`, and back.
// Clients watch and write meanwhile, a Deployment rolls out, and `kubectl get pods -w` runs. No write is lost, and no
// watch of Watershed's lists again.
func TestSwap(t *testing.T) {
	dir := harness.TempDir(t)
	if *swap {
		node.Prepare(t)
	}
	var flags []string
	if *swap {
		flags = node.Flags()
	}
	reference := harness.KubeAPIServer(t, dir, harness.Etcd(t, dir), flags...)
	image := "web"
	if *swap {
		reference.Managers()
		image = "watershed.dev/busybox:test"
		node.Join(t, reference.Server, node.Options{Lean: true, Programs: map[string]string{image: "/bin/busybox"}})
	} else {
		reference.Controllers()
	}
	s := &swapped{report: newReport(t), reference: reference, config: migrate(t, reference)}
	if *swap {
		s.Cleanup(func() {
			_, _ = reference.TryKubectl("", "delete", "deployments,pods", "--all", "--timeout=60s")
		})
	}
	reference.Apply(fmt.Sprintf(web, image))
	reference.Kubectl("rollout", "status", "deployment/web", "--timeout=110s")

	c, err := start(t.Context(), reference.Config(), 20, writePause)
	if err != nil {
		t.Fatal(err)
	}
	s.podWatcher = startPodWatcher(t, reference.Server)
	s.phase(c, "kube-apiserver", true, func() { s.rollOut() })
	pods := s.pods()
	s.phase(c, "kube-apiserver to Watershed", true, func() { s.during(s.toWatershed) })
	s.exec()
	s.phase(c, "Watershed to kube-apiserver", false, func() { s.during(s.toReference) })
	s.phase(c, "kube-apiserver to Watershed again", true, func() { s.during(s.toWatershed) })
	s.exec()
	for _, w := range c.stop() {
		t.Error(w)
	}
	s.table.Flush()
	s.podWatcher.report()
	if after := s.pods(); after != pods {
		t.Errorf("pods of the node that had nothing to do with it\n%s\nare now\n%s", pods, after)
	}
}

// web is a Deployment whose rollout lasts longer than a swap. quiet is a Deployment without changes.
const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 4
  minReadySeconds: 1
  strategy: {rollingUpdate: {maxUnavailable: 1, maxSurge: 1}}
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: web, image: %[1]q, args: [sleep, "100000"]}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: quiet}
spec:
  replicas: 2
  selector: {matchLabels: {app: quiet}}
  template:
    metadata: {labels: {app: quiet}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: quiet, image: %[1]q, args: [sleep, "100000"]}]
`

// swapped is a cluster whose API server is swapped.
type swapped struct {
	*report
	reference   *harness.Reference
	watershed   *harness.Server
	config, dir string
	rollouts    int
	podWatcher  *podWatcher
}

// migrate returns a file with the settings that `watershed migrate` derives from a kube-apiserver's manifest.
func migrate(t *testing.T, reference *harness.Reference) string {
	t.Helper()
	manifest := filepath.Join(reference.Dir, "kube-apiserver.yaml")
	if err := os.WriteFile(manifest, []byte(reference.Manifest()), 0o600); err != nil {
		t.Fatal(err)
	}
	settings, err := exec.Command(harness.Watershed(), "migrate", "--from", manifest).Output()
	if err != nil {
		t.Fatalf("migrate: %v", err)
	}
	path := filepath.Join(reference.Dir, "watershed.yaml")
	if err := os.WriteFile(path, settings, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *swapped) toWatershed() {
	s.reference.StopListening() // from now on it is like one kube-apiserver of several
	s.watershed = harness.Up(s.T, s.dir, "--config", s.config, fmt.Sprintf("--secure-port=%d", s.reference.Port))
	s.dir = s.watershed.Dir
	s.reference.Stop() // as a kubelet does: its open requests end
}

func (s *swapped) toReference() {
	s.watershed.StopListening()
	old := s.watershed
	s.reference.Restart()
	old.Stop()
}

// during swaps while a Deployment rolls out, and waits for the rollout.
func (s *swapped) during(swap func()) {
	s.Helper()
	s.begin()
	swap()
	s.reference.Kubectl("rollout", "status", "deployment/web", "--timeout=110s")
	shown := s.podWatcher.lines() // kubectl continues to show events
	s.reference.Kubectl("delete", "pod", "-l", "app=web", "--wait=false")
	harness.Eventually(s, harness.Soon, func() error {
		if n := s.podWatcher.lines(); n <= shown {
			return fmt.Errorf("kubectl get pods -w has shown %d lines before and after", n)
		}
		return nil
	})
	s.reference.Kubectl("rollout", "status", "deployment/web", "--timeout=110s")
}

func (s *swapped) rollOut() { s.during(func() {}) }

// begin starts a rollout.
func (s *swapped) begin() {
	s.Helper()
	s.rollouts++
	s.reference.Kubectl("patch", "deployment", "web", "-p",
		fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"rollout":"%d"}}}}}`, s.rollouts))
}

// pods returns the UIDs, phases and restart counts of quiet's pods.
func (s *swapped) pods() string {
	s.Helper()
	return s.reference.Kubectl(
		"get",
		"pods",
		"-l",
		"app=quiet",
		"--sort-by=.metadata.name",
		"-o",
		`jsonpath={range .items[*]}{.metadata.uid} {.status.phase} `+
			`{.status.containerStatuses[0].restartCount}{"\n"}{end}`,
	)
}

// exec runs a command in a pod of a real node.
func (s *swapped) exec() {
	s.Helper()
	if !*swap {
		return
	}
	if out := s.reference.Kubectl("exec", "deployment/quiet", "--", "/busybox", "echo", "here"); strings.TrimSpace(
		out,
	) != "here" {
		s.Errorf("kubectl exec: %q", out)
	}
}

// podWatcher is `kubectl get pods -w`, restarted when it ends.
type podWatcher struct {
	mu     sync.Mutex
	out    bytes.Buffer
	ended  int
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func startPodWatcher(t *testing.T, s *harness.Server) *podWatcher {
	ctx, cancel := context.WithCancel(t.Context())
	l := &podWatcher{cancel: cancel}
	l.done.Go(func() {
		for ctx.Err() == nil {
			cmd := exec.CommandContext(
				ctx,
				harness.Peer("kubectl"),
				"--kubeconfig",
				s.Kubeconfig,
				"get",
				"pods",
				"-w",
				"--no-headers",
			)
			cmd.Stdout, cmd.Stderr = l, l
			_ = cmd.Run()
			if ctx.Err() == nil {
				l.ended++
			}
			breathe(ctx)
		}
	})
	t.Cleanup(l.stop)
	return l
}

// Write receives kubectl's output.
func (l *podWatcher) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}

// lines returns the number of lines that kubectl has printed.
func (l *podWatcher) lines() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.out.Bytes(), []byte("\n"))
}

func (l *podWatcher) stop() {
	l.cancel()
	l.done.Wait()
}

// report prints a summary of kubectl's output.
func (l *podWatcher) report() {
	l.stop()
	fmt.Printf("kubectl get pods -w ended %d times and was started again; it showed %d lines\n", l.ended, l.lines())
}
