package e2e

import (
	"flag"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/test/harness"
)

var screenshots = flag.String("screenshots", "", "the directory for screenshots of the console, which need chromium")

// consoleObjects are a webhook that never responds, for ConfigMaps named slow, and the permission to get the console.
const consoleObjects = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: slow}
webhooks:
- name: slow.example.com
  clientConfig: {url: "https://%s/"}
  failurePolicy: Ignore
  timeoutSeconds: 1
  sideEffects: None
  admissionReviewVersions: [v1]
  matchConditions: [{name: slow, expression: "object.metadata.name == 'slow'"}]
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: watershed-console}
rules: [{nonResourceURLs: [/watershed, /watershed/*], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: watershed-console}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: watershed-console}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: operator}]
`

// TestConsole watches with kubectl, and expects the watch in the map of watches. A user needs the permission to get the
// console. A slow request is listed. If chromium is installed, it displays and drives each page.
func TestConsole(t *testing.T) {
	t.Parallel()
	start := harness.Up
	if *screenshots != "" {
		start = harness.Split
	}
	s := start(t, "")
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	operator := s.Identity("operator")
	if code := statusOf(t, operator, "/watershed"); code != http.StatusForbidden {
		t.Errorf("without a permission: %d", code)
	}
	s.Apply(fmt.Sprintf(consoleObjects, silent.Addr()))
	for _, resource := range []string{"configmaps", "secrets"} {
		harness.Start(t, s.Dir, "watch-"+resource, harness.Peer("kubectl"), "get", resource, "-A", "-w", "--kubeconfig",
			s.Identity("alice", "system:masters"))
	}
	s.Kubectl("create", "configmap", "first")
	shows := func(page, text string, act func()) {
		t.Helper()
		body := ""
		for end := time.Now().Add(harness.Soon); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			act()
			if _, body = s.Get(page); strings.Contains(body, text) {
				return
			}
		}
		t.Errorf("%s lacks %s\n%s", page, text, body)
	}
	shows("/watershed/watches?q=alice", `alice</bdi></th><td>configmaps</td><td class="n">1</td>`, func() {})
	shows("/watershed/requests", "<td>configmaps</td>", func() {
		s.Kubectl("create", "configmap", "slow")
		s.Kubectl("delete", "configmap", "slow")
	})
	for _, page := range []string{"", "/resources", "/events"} {
		if code := statusOf(t, operator, "/watershed"+page); code != http.StatusOK {
			t.Errorf("%s: %d", page, code)
		}
	}
	t.Run("chromium", func(t *testing.T) { driveConsole(t, s) })
}

// statusOf returns the status code of a path for the user of a kubeconfig.
func statusOf(t *testing.T, kubeconfig, path string) int {
	t.Helper()
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Get(c.Host + path)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}
