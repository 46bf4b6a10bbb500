package e2e

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// registration returns the manifest of an APIService and of its Service, at an address of this machine.
func registration(t *testing.T, port int) string {
	t.Helper()
	return fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata: {name: wardle}
---
apiVersion: v1
kind: Service
metadata: {name: api, namespace: wardle}
spec: {ports: [{port: 443, targetPort: %[1]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: api-1, namespace: wardle, labels: {kubernetes.io/service-name: api}}
addressType: IPv4
ports: [{name: "", port: %[1]d, protocol: TCP}]
endpoints: [{addresses: [%[2]q], conditions: {ready: true}}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1alpha1.wardle.example.com}
spec: {insecureSkipTLSVerify: true, group: wardle.example.com, groupPriorityMinimum: 1000, versionPriority: 15, service: {name: api, namespace: wardle}, version: v1alpha1}
`, port, harness.HostAddress(t))
}

// TestAnAggregatedServerIsServed checks that the gateway proxies the sample API server with the identity of the client.
// While the server is down only its own paths return 503.
func TestAnAggregatedServerIsServed(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--enable-aggregator-routing")
	dir := harness.TempDir(t)
	port := porttest.FreePort(t)
	etcd := harness.Etcd(t, dir)
	start := func() *harness.Process {
		return harness.Start(t, dir, "sample-apiserver", harness.Peer("sample-apiserver"), "--etcd-servers", etcd,
			"--secure-port", fmt.Sprint(port), "--cert-dir", filepath.Join(dir, "certs"),
			"--kubeconfig", s.Kubeconfig, "--authentication-kubeconfig", s.Kubeconfig, "--authorization-kubeconfig",
			s.Kubeconfig)
	}
	sample := start()
	s.Apply(registration(t, port))
	available := func(want string) {
		t.Helper()
		harness.Eventually(t, harness.Soon, func() error {
			out, err := s.TryKubectl("", "get", "apiservice", "v1alpha1.wardle.example.com", "-o",
				`jsonpath={.status.conditions[?(@.type=="Available")].status}`)
			if err != nil || out != want {
				return fmt.Errorf("%v: available is %q", err, out)
			}
			return nil
		})
	}
	available("True")
	harness.Eventually(t, harness.BeforeRefresh, func() error { // discovery catches up
		out, err := s.TryKubectl("", "api-resources", "--api-group=wardle.example.com")
		if err != nil || !strings.Contains(out, "flunders") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	const flunder = `{apiVersion: wardle.example.com/v1alpha1, kind: Flunder, metadata: {name: f}, ` +
		`spec: {reference: x}}`
	contains(t, "apply", s.Apply(flunder), "flunder.wardle.example.com/f created")
	contains(t, "get", s.Kubectl("get", "flunders"), "f ")
	contains(t, "explain", s.Kubectl("explain", "flunder.spec.reference"), "<string>")
	// The server sees the authenticated user, even if the client sends identity headers.
	if out, err := s.TryKubectl("", "get", "flunders", "--as=nobody"); err == nil ||
		!strings.Contains(out, "forbidden") {
		t.Errorf("as nobody: %s", out)
	}
	config := s.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: "nobody"}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		config.Host+"/apis/wardle.example.com/v1alpha1/flunders", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Remote-User", "admin")
	req.Header.Set("X-Remote-Group", "system:masters")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("smuggled X-Remote-User: %s", resp.Status)
	}
	sample.Kill()
	available("False")
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "--raw", "/apis/wardle.example.com/v1alpha1/flunders")
		if err == nil || !strings.Contains(out, "ServiceUnavailable") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	s.Kubectl("get", "configmaps")
	start()
	available("True")
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "flunders")
		if err != nil || !strings.Contains(out, "f ") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
}
