package e2e

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// TestWebhooksAtTheAPIsOwnService checks webhooks that name the Service default/kubernetes and the path of an
// aggregated server. The gateway receives these calls, although nothing routes the address of the Service here.
func TestWebhooksAtTheAPIsOwnService(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, string, ...string) *harness.Server{
		"up":    harness.Up,
		"split": harness.Split,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conversion := &converter{}
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				switch req.URL.Path {
				case "/apis/wardle.example.com/v1alpha1/conversions":
					conversion.serve(w, req)
				case "/apis/wardle.example.com/v1alpha1/admissions":
					refuse(w, req)
				default:
					fmt.Fprint(w, `{"kind":"APIResourceList","apiVersion":"v1",`+
						`"groupVersion":"wardle.example.com/v1alpha1","resources":[]}`)
				}
			}))
			listener, err := net.Listen("tcp", "0.0.0.0:0") // endpoints cannot have loopback addresses
			if err != nil {
				t.Fatal(err)
			}
			server.Listener, server.TLS = listener, &tls.Config{}
			server.StartTLS()
			t.Cleanup(server.Close)
			s := start(t, "", "--enable-aggregator-routing")
			s.Apply(registration(t, listener.Addr().(*net.TCPAddr).Port))
			s.Kubectl("wait", "--timeout=2m", "--for=condition=Available", "apiservice/v1alpha1.wardle.example.com")
			ca, err := os.ReadFile(s.CA + ".crt")
			if err != nil {
				t.Fatal(err)
			}
			s.Apply(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reviews}
rules: [{apiGroups: [wardle.example.com], resources: [conversions, admissions], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reviews}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reviews}
subjects:
- {kind: User, name: "system:watershed:admission", apiGroup: rbac.authorization.k8s.io}
- {kind: User, name: "system:watershed:registry", apiGroup: rbac.authorization.k8s.io}
`)
			at := func(path string) string {
				return fmt.Sprintf(`{service: {namespace: default, name: kubernetes, `+
					`path: /apis/wardle.example.com/v1alpha1/%s}, caBundle: %s}`,
					path, base64.StdEncoding.EncodeToString(ca))
			}
			define(t, s, widgetsDefinition(fmt.Sprintf(
				`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: %s}}`, at("conversions"))))
			s.Apply(`{apiVersion: e2e.example.com/v2, kind: Widget, metadata: {name: w, namespace: default}, ` +
				`spec: {host: a, port: "1"}}`)
			contains(t, "version 1", s.Kubectl("get", "widgets.v1.e2e.example.com", "w", "-o", "yaml"), "hostPort: a:1")
			s.Apply(fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: refusal}
webhooks:
- name: refusal.example.com
  clientConfig: %s
  rules: [{apiGroups: [e2e.example.com], apiVersions: [v1], resources: [widgets], operations: [CREATE]}]
  sideEffects: None
  admissionReviewVersions: [v1]
  failurePolicy: Ignore
`, at("admissions")))
			harness.Eventually(t, harness.Soon, func() error { // admission watches configurations
				out, err := s.TryKubectl(`{apiVersion: e2e.example.com/v2, kind: Widget, metadata: {generateName: w, `+
					`namespace: default}, spec: {host: a, port: "1"}}`, "create", "-f-")
				if err == nil || !strings.Contains(out, "refused by the aggregated server") {
					return fmt.Errorf("%v: %s", err, out)
				}
				return nil
			})
		})
	}
}

// refuse responds to an admission review.
func refuse(w http.ResponseWriter, req *http.Request) {
	var review struct {
		Request struct{ UID string }
	}
	body, _ := io.ReadAll(req.Body)
	if err := json.Unmarshal(body, &review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	fmt.Fprintf(w, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":%q,`+
		`"allowed":false,"status":{"message":"refused by the aggregated server"}}}`, review.Request.UID)
}
