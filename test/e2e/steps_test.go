package e2e

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"watershed.dev/platform/porttest"
	"watershed.dev/platform/telemetry"
	"watershed.dev/test/harness"
)

// slowWebhooks is a server of authentication, authorization and admission webhooks. It allows everything after a delay.
func slowWebhooks(t *testing.T) *httptest.Server {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review map[string]any
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			t.Error(err)
			return
		}
		select {
		case <-time.After(telemetry.SlowRequest):
		case <-r.Context().Done():
		}
		switch r.URL.Path {
		case "/authn":
			review["status"] = map[string]any{"authenticated": true, "user": map[string]any{"username": "bob"}}
		case "/authz":
			review["status"] = map[string]any{"allowed": true}
		default:
			uid := review["request"].(map[string]any)["uid"]
			review = map[string]any{"apiVersion": review["apiVersion"], "kind": review["kind"],
				"response": map[string]any{"uid": uid, "allowed": true}}
		}
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(server.Close)
	return server
}

// TestASlowRequestHasTheStepsOfEveryService makes each service slow: authn, authz and admission by webhooks, registry
// and watchfanout by an etcd that pauses. The line of the gateway names the service.
func TestASlowRequestHasTheStepsOfEveryService(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"up", "split"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			dir, server := harness.TempDir(t), slowWebhooks(t)
			webhook := func(name string) string {
				path := filepath.Join(dir, name+".kubeconfig")
				text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: x, clusters: [{name: c, cluster: {`+
					`server: %q, insecure-skip-tls-verify: true}}], users: [{name: u}], `+
					`contexts: [{name: x, context: {cluster: c, user: u}}]}`, server.URL+"/"+name)
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				return path
			}
			flags := []string{"-v=2", "--authorization-mode=Node,RBAC,Webhook",
				"--authentication-token-webhook-config-file=" + webhook("authn"),
				"--authorization-webhook-config-file=" + webhook("authz")}
			var s *harness.Server
			var etcd int
			if form == "up" {
				url := fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))
				etcd = harness.Start(t, dir, "etcd", harness.Peer("etcd"), "--data-dir", filepath.Join(dir, "etcd-data"),
					"--listen-client-urls", url, "--advertise-client-urls", url, "--log-level", "error",
					"--listen-peer-urls", fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))).Cmd.Process.Pid
				s = harness.Up(t, dir, append(flags, "--etcd-servers="+url)...)
			} else {
				s = harness.Split(t, dir, flags...)
				etcd = pid(t, s, "etcd-0")
			}
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
			s.Apply(fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: slow}
webhooks:
- name: slow.example.com
  clientConfig: {url: %q, caBundle: %s}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}
  admissionReviewVersions: [v1]
  sideEffects: None
`, server.URL+"/admit", base64.StdEncoding.EncodeToString(ca)))

			bob := rest.AnonymousClientConfig(s.Config())
			bob.BearerToken = "bob"
			send := func(config *rest.Config, method, path, body string) {
				client, err := harness.HTTPClient(config)
				if err != nil {
					t.Error(err)
					return
				}
				client.Timeout = time.Minute
				req, err := http.NewRequestWithContext(t.Context(), method,
					config.Host+"/api/v1/namespaces/default"+path, strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/json")
				if resp, err := client.Do(req); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}
			n := 0
			harness.Eventually(t, harness.Soon, func() error { // admission reads the configuration after some time
				n++
				send(bob, http.MethodPost, "/configmaps", fmt.Sprintf(`{"metadata":{"name":"c-%d"}}`, n))
				return hasSteps(s, "Create", "configmaps", "authn.v1.Authn/Authenticate", "authz.v1.Authz/Authorize",
					"admission.v1.Admission/Validate")
			})
			harness.Eventually(t, harness.Soon, func() error { // a request may begin late
				n++
				if err := syscall.Kill(etcd, syscall.SIGSTOP); err != nil {
					return err
				}
				resume := time.AfterFunc(2*telemetry.SlowRequest, func() { _ = syscall.Kill(etcd, syscall.SIGCONT) })
				defer resume.Stop()
				defer func() { _ = syscall.Kill(etcd, syscall.SIGCONT) }()
				var all sync.WaitGroup
				all.Go(func() {
					send(s.Config(), http.MethodPost, "/podtemplates", fmt.Sprintf(
						`{"metadata":{"name":"p-%d"},"template":{"spec":{"containers":[{"name":"a","image":"a"}]}}}`, n))
				})
				all.Go(func() { send(s.Config(), http.MethodGet, "/secrets", "") })
				all.Go(func() { send(s.Config(), http.MethodGet, "/configmaps/c-1", "") })
				all.Wait()
				for _, err := range []error{
					hasSteps(s, "Create", "podtemplates", "registry.v1.Objects/Write"),
					hasSteps(s, "List", "secrets", "watchfanout.v1.Watch/List"),
					hasSteps(s, "Get", "configmaps", "registry.v1.Objects/Get"),
				} {
					if err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

// hasSteps returns an error unless the log has a slow request with a step of each call.
func hasSteps(s *harness.Server, verb, resource string, calls ...string) error {
	logs, err := filepath.Glob(filepath.Join(s.Dir, "*.log"))
	if err != nil {
		return err
	}
	for _, path := range logs {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
	lines:
		for line := range strings.Lines(string(text)) {
			if !strings.Contains(line, `: \"`+verb+`\" audit-id:`) || !strings.Contains(line, ",resource:"+resource+",") {
				continue
			}
			for _, call := range calls {
				if !strings.Contains(line, `---\"/watershed.`+call) { // Write or WriteUnary
					continue lines
				}
			}
			return nil
		}
	}
	return fmt.Errorf("no slow %s of %s has the steps %v", verb, resource, calls)
}
