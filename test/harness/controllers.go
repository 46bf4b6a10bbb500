package harness

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Managers runs kube-controller-manager, with more flags, and kube-scheduler, without nodes. It returns the directory
// of their logs.
func (s *Server) Managers(flags ...string) string {
	s.t.Helper()
	dir := TempDir(s.t)
	s.ControllerManager(s.t, dir, flags...)
	Start(s.t, dir, "kube-scheduler", Peer("kube-scheduler"),
		"--kubeconfig", s.Identity("system:kube-scheduler"),
		"--leader-elect=false", "--secure-port", "0")
	return dir
}

// ControllerManager runs kube-controller-manager, with more flags. Its log is in dir.
func (s *Server) ControllerManager(t testing.TB, dir string, flags ...string) *Process {
	t.Helper()
	return Start(t, dir, "kube-controller-manager", Peer("kube-controller-manager"), append([]string{
		"--kubeconfig", s.Identity("system:kube-controller-manager"),
		"--service-account-private-key-file", s.SAKey,
		"--use-service-account-credentials", "--root-ca-file", s.CA + ".crt",
		"--cluster-signing-cert-file", s.CA + ".crt", "--cluster-signing-key-file", s.CA + ".key",
		"--leader-elect=false", "--secure-port", "0", "--controllers", "*"}, flags...)...)
}

// Controllers runs kube-controller-manager, kube-scheduler and kwok with three nodes.
func (s *Server) Controllers() {
	s.t.Helper()
	dir := s.Managers()
	port := fmt.Sprint(FreePort(s.t))
	cert, key := s.ServingCertificate("kwok", "127.0.0.1")
	Start(s.t, dir, "kwok", Peer("kwok"), "--kubeconfig", s.Kubeconfig, "--manage-all-nodes=true", "--node-ip",
		"127.0.0.1", "--node-port", port, "--cidr", "10.244.0.0/16",
		"--server-address", "127.0.0.1:"+port, "--tls-cert-file", cert, "--tls-private-key-file", key,
		"--config", stages(s.t, dir), "--node-lease-duration-seconds", "40")
	var nodes strings.Builder
	for i := range 3 {
		fmt.Fprintf(&nodes, `---
apiVersion: v1
kind: Node
metadata: {name: kwok-%d, labels: {kubernetes.io/hostname: kwok-%d, kubernetes.io/os: linux, kubernetes.io/arch: amd64}, annotations: {kwok.x-k8s.io/node: fake}}
status: {allocatable: {cpu: 32, memory: 256Gi, pods: 110}, capacity: {cpu: 32, memory: 256Gi, pods: 110}}
`, i, i)
	}
	s.Apply(nodes.String())
}

// stages writes kwok's default stages into a file: nodes become Ready, pods run or complete.
func stages(t testing.TB, dir string) string {
	out, err := exec.Command("go", "list", "-C", filepath.Join(Root(), "test"), "-m", "-f",
		"{{.Dir}}", "sigs.k8s.io/kwok").Output()
	if err != nil {
		t.Fatalf("find kwok's module: %v", err)
	}
	var all bytes.Buffer
	for _, s := range []string{"node/fast", "node/heartbeat-with-lease", "pod/fast"} {
		files, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "kustomize", "stage", s, "*.yaml"))
		for _, f := range files {
			if filepath.Base(f) == "kustomization.yaml" {
				continue
			}
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
			all.WriteString("\n---\n")
		}
	}
	path := filepath.Join(dir, "stages.yaml")
	if err := os.WriteFile(path, all.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
