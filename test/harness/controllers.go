package harness

import (
	"fmt"
	"strings"
	"testing"

	"watershed.dev/platform/porttest"
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

// Controllers runs kube-controller-manager, kube-scheduler and kwok with three nodes. Nodes become Ready, and pods run
// or complete: kwok's default stages.
func (s *Server) Controllers() {
	s.t.Helper()
	dir := s.Managers()
	port := fmt.Sprint(porttest.FreePort(s.t))
	cert, key := s.ServingCertificate("kwok", "127.0.0.1")
	Start(s.t, dir, "kwok", Peer("kwok"), "--kubeconfig", s.Kubeconfig, "--manage-all-nodes=true", "--node-ip",
		"127.0.0.1", "--node-port", port, "--cidr", "10.244.0.0/16",
		"--server-address", "127.0.0.1:"+port, "--tls-cert-file", cert, "--tls-private-key-file", key,
		"--config", Peer("kwok-stages.yaml"), "--node-lease-duration-seconds", "40")
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
