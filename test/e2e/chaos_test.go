package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// tenant creates a service account that may do everything in one namespace, and returns its token.
func tenant(t *testing.T, s *harness.Server, namespace string) string {
	t.Helper()
	s.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata: {name: %[1]s}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: tenant, namespace: %[1]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: all, namespace: %[1]s}
rules: [{apiGroups: ["*"], resources: ["*"], verbs: ["*"]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: all, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: all}
subjects: [{kind: ServiceAccount, name: tenant, namespace: %[1]s}]
`, namespace))
	return strings.TrimSpace(s.Kubectl("create", "token", "tenant", "-n", namespace))
}

// send sends a request with a token. An empty token makes it anonymous.
func send(t *testing.T, s *harness.Server, token, method, path, contentType string, body []byte) (int, string) {
	t.Helper()
	c := rest.CopyConfig(s.Config())
	c.CertFile, c.KeyFile, c.CertData, c.KeyData = "", "", nil, nil
	c.BearerToken = token
	client, err := harness.HTTPClient(c)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, c.Host+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data)
}

// write sends a write with a token until its result is known, and fails the test if the write is rejected.
func write(t *testing.T, s *harness.Server, token, method, path, contentType string, body []byte) {
	t.Helper()
	harness.Write(t, func() error { return harness.Failure(send(t, s, token, method, path, contentType, body)) })
}

// TestATenantCannotHurtTheOthers checks that a tenant's objects do not affect other tenants' watches and lists, also
// when the watch tier restarts (S1, S5).
func TestATenantCannotHurtTheOthers(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	token := tenant(t, s, "t")
	w, err := s.Client().CoreV1().ConfigMaps("kube-system").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	waitForEvent := func(name string) {
		t.Helper()
		s.Kubectl("create", "configmap", name, "-n", "kube-system")
		for until := time.After(harness.Soon); ; {
			select {
			case e, ok := <-w.ResultChan():
				if !ok {
					t.Fatalf("the watch of another namespace has ended (%s)", name)
				}
				if c, ok := e.Object.(*corev1.ConfigMap); ok && c.Name == name {
					return
				}
			case <-until:
				t.Fatalf("the watch of another namespace does not receive %s", name)
			}
		}
	}
	waitForEvent("before")
	corrupt := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "corrupt"},
		Type:       "\xff",
	}
	data, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), corrupt)
	if err != nil {
		t.Fatal(err)
	}
	write(t, s, token, http.MethodPost, "/api/v1/namespaces/t/secrets", runtime.ContentTypeProtobuf, data)
	waitForEvent("after-corrupt")
	for _, path := range []string{"/api/v1/secrets", "/api/v1/namespaces/t/secrets?fieldSelector=type%3D%FF",
		"/api/v1/namespaces/%FF/secrets", "/api/v1/namespaces/t/secrets/%FF", "/%FF"} {
		if code, body := s.Get(path); code == http.StatusInternalServerError || code == 0 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	large := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"big-%%d"},"data":{"x":%q}}`,
		strings.Repeat("<", 1_000_000))
	for i := range 12 {
		write(t, s, token, http.MethodPost, "/api/v1/namespaces/t/configmaps", "application/json",
			fmt.Appendf(nil, large, i))
	}
	waitForEvent("after-large")
	for i := range 20 { // each event is about 14 MB
		send(t, s, token, http.MethodPatch, "/api/v1/namespaces/t/configmaps/big-0", "application/merge-patch+json",
			fmt.Appendf(nil, `{"metadata":{"labels":{"n":"%d"}}}`, i))
	}
	waitForEvent("after-patches")
	w.Stop()
	for _, name := range []string{"watchfanout-0", "watchfanout-1"} {
		if err := syscall.Kill(pid(t, s, name), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"/api/v1/namespaces/kube-system/configmaps",
		"/api/v1/namespaces/kube-system/configmaps?limit=1", "/api/v1/configmaps",
		"/api/v1/namespaces/kube-system/secrets"} {
		harness.Eventually(t, harness.Soon, func() error {
			if code, body := s.Get(path); code != http.StatusOK {
				return fmt.Errorf("%s: %d %.200s", path, code, body)
			}
			return nil
		})
	}
	harness.Eventually(t, harness.Soon, func() error {
		if code, body := s.Get("/readyz/watch-tier"); code != http.StatusOK {
			return fmt.Errorf("%d %.200s", code, body)
		}
		return nil
	})
	if w, err = s.Client().CoreV1().ConfigMaps("kube-system").Watch(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	waitForEvent("at-the-end")
}

// resident returns a process's resident memory in MB.
func resident(t *testing.T, pid int) (mb int) {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "VmRSS:")
	if _, err := fmt.Sscan(rest, &mb); err != nil {
		t.Fatal(err)
	}
	return mb / 1024
}

// TestAnonymousRequestsLeaveNoMemory checks that anonymous requests leave no memory behind: 600 of 900 KB would be
// 540 MB (S2).
func TestAnonymousRequestsLeaveNoMemory(t *testing.T) {
	s := harness.Up(t, "")
	data, err := os.ReadFile(filepath.Join(s.Dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	var process int
	if _, err := fmt.Sscan(string(data), &process); err != nil {
		t.Fatal(err)
	}
	before := resident(t, process)
	long := strings.Repeat("a", 900_000)
	for i := range 300 {
		send(t, s, fmt.Sprint(i, long), http.MethodGet, "/version", "", nil)
		send(t, s, "", http.MethodGet, fmt.Sprintf("/%d%s", i, long), "", nil)
	}
	harness.Eventually(t, 30*time.Second, func() error {
		if now := resident(t, process); now > before+350 {
			return fmt.Errorf("%d MB before, %d after", before, now)
		}
		return nil
	})
	t.Logf("%d MB before 600 anonymous requests, %d after", before, resident(t, process))
}

// TestAPolicyUsesALaterCRD checks three findings:
//
//   - A policy works once the CRD of its parameters exists (features F3).
//   - Tokens with the operator's issuer are accepted (F4).
//   - A webhook whose match condition authorizes is not called for its own SubjectAccessReview (S14).
func TestAPolicyUsesALaterCRD(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--service-account-issuer=https://issuer.example.com")
	token := tenant(t, s, "t")
	if code, body := send(t, s, token, http.MethodGet, "/api/v1/namespaces/t/configmaps",
		"", nil); code != http.StatusOK {
		t.Errorf("a token of the issuer: %d %s", code, body)
	}
	s.Apply(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: later}
spec:
  failurePolicy: Fail
  paramKind: {apiVersion: later.example.com/v1, kind: Limit}
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "!object.metadata.name.startsWith(params.spec.prefix)"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: later}
spec:
  policyName: later
  validationActions: [Deny]
  paramRef: {name: l, parameterNotFoundAction: Deny}
  matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: t}}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: recursive}
webhooks:
- name: recursive.example.com
  clientConfig: {url: "https://127.0.0.1:1/"}
  failurePolicy: Ignore
  sideEffects: None
  admissionReviewVersions: [v1]
  timeoutSeconds: 1
  rules: [{apiGroups: ["*"], apiVersions: ["*"], operations: [CREATE], resources: ["*/*"]}]
  matchConditions:
  - name: breakglass
    expression: "!authorizer.group('admissionregistration.k8s.io').resource('validatingwebhookconfigurations')\
      .name('recursive').check('breakglass').allowed()"
`)
	harness.Eventually(t, harness.Soon, func() error {
		if out, err := s.TryKubectl("", "create", "configmap", "refused", "-n", "t"); err == nil {
			_, _ = s.TryKubectl("", "delete", "configmap", "refused", "-n", "t")
			return fmt.Errorf("the policy is not in force yet: %s", out)
		}
		return nil
	})
	s.Apply(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: limits.later.example.com}
spec:
  group: later.example.com
  names: {plural: limits, singular: limit, kind: Limit}
  scope: Cluster
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {prefix: {type: string}}}}}}}]
`)
	harness.Eventually(t, harness.Soon, func() error {
		_, err := s.TryKubectl(
			`{"apiVersion":"later.example.com/v1","kind":"Limit","metadata":{"name":"l"},"spec":{"prefix":"bad"}}`,
			"apply", "-f", "-")
		return err
	})
	harness.Eventually(t, harness.Soon, func() error {
		if out, err := s.TryKubectl("", "create", "configmap", "good", "-n", "t"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if out, err := s.TryKubectl("", "create", "configmap", "bad-one", "-n", "t"); err == nil ||
		!strings.Contains(out, "denied") && !strings.Contains(out, "failed expression") {
		t.Errorf("the policy lets it through, or says something else: %s", out)
	}
	began := time.Now()
	if _, err := s.Client().CoreV1().ConfigMaps("default").Create(t.Context(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "quick"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("a creation takes %v: the webhook is called for its own SubjectAccessReview", took)
	}
}
