package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// many is the number of ConfigMaps that are listed; doomed is the number that one request deletes.
const many, doomed = 5000, 2000

// prepare creates the objects that the requests use.
func prepare(t *testing.T, s *harness.Server, h *hanging) {
	address := harness.HostAddress(t)
	hook := func(kind, phase, namespace string) string {
		return fmt.Sprintf(`---
apiVersion: admissionregistration.k8s.io/v1
kind: %sWebhookConfiguration
metadata: {name: hang-%s}
webhooks:
- name: hang.example.com
  clientConfig: %s
  admissionReviewVersions: [v1]
  sideEffects: None
  timeoutSeconds: 30
  failurePolicy: Fail
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE, UPDATE, DELETE, CONNECT],
    resources: [configmaps, services/proxy]}]
`, kind, phase, h.webhook(t, s, phase), namespace)
	}
	s.Kubectl("create", "serviceaccount", "default")
	s.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata: {name: mutating}
---
apiVersion: v1
kind: Namespace
metadata: {name: validating}
---
apiVersion: v1
kind: Namespace
metadata: {name: many}
---
apiVersion: v1
kind: Namespace
metadata: {name: doomed}
---
apiVersion: v1
kind: Namespace
metadata: {name: policy}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: there, namespace: mutating}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: there, namespace: validating}
---
apiVersion: v1
kind: Node
metadata: {name: node}
---
apiVersion: v1
kind: Pod
metadata: {name: p}
spec: {automountServiceAccountToken: false, nodeName: node, containers: [{name: c, image: x, ports: [{containerPort: %[2]s}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: s}
spec: {ports: [{port: 443, targetPort: %[2]s}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s-1, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{name: "", port: %[2]s, protocol: TCP}]
endpoints: [{addresses: [%[1]q], conditions: {ready: true}}]
---
apiVersion: v1
kind: Endpoints
metadata: {name: s}
subsets: [{addresses: [{ip: %[1]q, targetRef: {kind: Pod, namespace: default, name: p}}], ports: [{port: %[2]s}]}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.hang.example.com}
spec: {insecureSkipTLSVerify: true, group: hang.example.com, groupPriorityMinimum: 1000, versionPriority: 15, service: {name: s, namespace: default}, version: v1}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: costly}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: policy}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "object.data.all(k, object.data.all(l, k != l + 'x'))"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: costly}
spec: {policyName: costly, validationActions: [Deny]}
`, address, h.port()))
	for _, patch := range [][]string{
		{"node", "node", fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q}],`+
			`"daemonEndpoints":{"kubeletEndpoint":{"Port":%s}}}}`, address, h.port())},
		{"pod", "p", fmt.Sprintf(`{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}]}}`, address, address)},
	} {
		s.Kubectl("patch", patch[0], patch[1], "--subresource=status", "--type=merge", "-p", patch[2])
	}
	define(t, s, widgetsDefinition(fmt.Sprintf(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1],`+
		` clientConfig: %s}}`, h.webhook(t, s, "convert"))))
	for i := range 3 {
		s.Apply(fmt.Sprintf(`{apiVersion: e2e.example.com/v1, kind: Widget, metadata: {name: w%d}, `+
			`spec: {hostPort: a}}`, i))
	}
	var wg sync.WaitGroup
	create := s.Client().CoreV1()
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < many; i += 16 {
				namespace := "many"
				if i < doomed {
					namespace = "doomed"
				}
				harness.TryWrite(t, func() error {
					_, err := create.ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
						ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d", i)},
						Data:       map[string]string{"a": strings.Repeat("x", 500)},
					}, metav1.CreateOptions{})
					return err
				})
			}
		})
	}
	wg.Wait()
	s.Apply(hook("Mutating", "mutate", "mutating") + hook("Validating", "validate", "validating"))
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "apiservice", "v1.hang.example.com", "-o",
			`jsonpath={.status.conditions[?(@.type=="Available")].status}`)
		if err != nil || out != "True" {
			return fmt.Errorf("%v: available is %q", err, out)
		}
		return nil
	})
}

// requests returns one request of each costly kind.
func requests(t *testing.T, h *hanging) []costly {
	const (
		yaml     = "application/yaml"
		asJSON   = "application/json"
		table    = "application/json;as=Table;v=v1;g=meta.k8s.io"
		widgets2 = "/apis/e2e.example.com/v2/namespaces/default/widgets"
		cms      = "/api/v1/configmaps"
		pod      = "/api/v1/namespaces/default/pods/p"
	)
	cm := func(name string) []byte {
		return []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `"}}`)
	}
	data := map[string]string{}
	for i := range 3000 {
		data[fmt.Sprintf("key-%d", i)] = "v"
	}
	costlyCM, err := json.Marshal(&corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: "costly"}, Data: data,
	})
	if err != nil {
		t.Fatal(err)
	}
	socket := map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
		"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "v5.channel.k8s.io"}
	tunnel := map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
		"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "SPDY/3.1+portforward.k8s.io"}
	spdy := map[string]string{"Connection": "Upgrade", "Upgrade": "SPDY/3.1",
		"X-Stream-Protocol-Version": "v4.channel.k8s.io"}
	short := 100 * time.Millisecond
	var terms []string
	for i := range 10000 {
		terms = append(terms, fmt.Sprintf("l%d!=x", i))
	}
	return []costly{
		{name: "create, mutating webhook", method: "POST", path: "/api/v1/namespaces/mutating/configmaps",
			contentType: asJSON, body: cm("new"), comes: true},
		{name: "create, validating webhook", method: "POST", path: "/api/v1/namespaces/validating/configmaps",
			contentType: asJSON, body: cm("new"), comes: true},
		{name: "merge patch", method: "PATCH", path: "/api/v1/namespaces/mutating/configmaps/there",
			contentType: "application/merge-patch+json", body: []byte(`{"data":{"a":"b"}}`), comes: true},
		{name: "apply", method: "PATCH", path: "/api/v1/namespaces/mutating/configmaps/there?fieldManager=m",
			contentType: "application/apply-patch+yaml", body: cm("there"), comes: true},
		{name: "delete", method: "DELETE", path: "/api/v1/namespaces/validating/configmaps/there", comes: true},
		{name: "delete, collection and webhook", method: "DELETE", path: "/api/v1/namespaces/validating/configmaps",
			comes: true},
		{name: "list in another version", method: "GET", path: widgets2, comes: true},
		{name: "get in another version", method: "GET", path: widgets2 + "/w0", comes: true},
		{name: "table in another version", method: "GET", path: widgets2, accept: table, comes: true},
		{name: "create in another version", method: "POST", path: widgets2,
			contentType: asJSON,
			body:        []byte(`{"apiVersion":"e2e.example.com/v2","kind":"Widget","metadata":{"name":"new"}}`),
			comes:       true},
		{name: "patch in another version", method: "PATCH", path: widgets2 + "/w0",
			contentType: "application/merge-patch+json", body: []byte(`{"spec":{"replicas":2}}`), comes: true},
		{name: "watch in another version", method: "GET", path: widgets2 + "?watch=1", comes: true},
		{name: "watch in another version with selector", method: "GET",
			path: widgets2 + "?watch=1&fieldSelector=spec.host%3Da", comes: true},
		{name: "list as Table", method: "GET", path: cms, accept: table, after: short},
		{name: "list as Table from etcd", method: "GET",
			path:   cms + "?resourceVersion=1&resourceVersionMatch=NotOlderThan&limit=0&pretty=true",
			accept: table, after: short},
		{name: "list as YAML", method: "GET", path: cms, accept: yaml, after: short, library: true},
		{name: "list compressed", method: "GET", path: cms,
			headers: map[string]string{"Accept-Encoding": "gzip"}, after: short},
		{name: "list with a long selector", method: "GET", path: cms + "?labelSelector=" + strings.Join(terms, ","),
			after: short},
		{name: "list with a long selector from etcd", method: "GET",
			path: cms + "?pretty=true&labelSelector=" + strings.Join(terms, ","), after: short},
		{name: "policy near its budget", method: "POST", path: "/api/v1/namespaces/policy/configmaps",
			contentType: asJSON, body: costlyCM, after: short, library: true},
		{name: "watch with initial events", method: "GET", path: cms + "?watch=1", after: short},
		{name: "watch-list", method: "GET",
			path:  cms + "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
			after: short},
		{name: "watch Table", method: "GET", path: cms + "?watch=1", accept: table, after: short},
		{name: "watch with a long selector", method: "GET",
			path: cms + "?watch=1&labelSelector=" + strings.Join(terms, ","), after: short},
		{name: "aggregated server", method: "GET", path: "/apis/hang.example.com/v1/things", comes: true},
		{name: "aggregated watch", method: "GET", path: "/apis/hang.example.com/v1/things?watch=1", comes: true},
		{name: "aggregated upgrade", method: "GET", path: "/apis/hang.example.com/v1/things/x/exec",
			headers: socket, comes: true},
		{name: "service proxy", method: "GET", path: "/api/v1/namespaces/default/services/https:s:443/proxy/x",
			comes: true},
		{name: "service proxy, upgrade", method: "GET", path: "/api/v1/namespaces/default/services/https:s:443/proxy/x",
			headers: socket, comes: true},
		{name: "pod proxy", method: "GET", path: "/api/v1/namespaces/default/pods/https:p:" + h.port() + "/proxy/x",
			comes: true},
		{name: "node proxy", method: "GET", path: "/api/v1/nodes/node/proxy/x", comes: true},
		{name: "exec, SPDY", method: "POST", path: pod + "/exec?command=x&stdout=1", headers: spdy, comes: true},
		{name: "exec, WebSocket", method: "GET", path: pod + "/exec?command=x&stdout=1",
			headers: socket, comes: true},
		{name: "attach, SPDY", method: "POST", path: pod + "/attach?stdout=1", headers: spdy, comes: true},
		{name: "port-forward, SPDY", method: "POST", path: pod + "/portforward", headers: spdy, comes: true},
		{name: "port-forward, WebSocket", method: "GET", path: pod + "/portforward", headers: tunnel, comes: true},
		{name: "log", method: "GET", path: pod + "/log?follow=true", comes: true},
		{name: "SubjectAccessReview", method: "POST", path: "/apis/authorization.k8s.io/v1/subjectaccessreviews",
			contentType: asJSON, comes: true,
			body: []byte(`{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview",` +
				`"spec":{"user":"hanging-bob","resourceAttributes":{"verb":"get","resource":"pods"}}}`)},
		{name: "authorization", method: "GET", path: "/api/v1/pods",
			headers: map[string]string{"Impersonate-User": "hanging-eve"}, comes: true},
		{name: "TokenReview", method: "POST", path: "/apis/authentication.k8s.io/v1/tokenreviews",
			contentType: asJSON, comes: true,
			body: []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":"unknown"}}`)},
		{name: "authentication", method: "GET", path: "/api/v1/pods",
			headers: map[string]string{"Authorization": "Bearer another"}, comes: true},
		{name: "OpenAPI v2", method: "GET", path: "/openapi/v2", after: 20 * time.Millisecond},
		{name: "OpenAPI v3", method: "GET", path: "/openapi/v3/apis/apps/v1", after: 5 * time.Millisecond},
		{name: "discovery", method: "GET", path: "/apis",
			accept: "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
			after:  5 * time.Millisecond},
		{name: "delete collection", method: "DELETE", path: "/api/v1/namespaces/doomed/configmaps", after: short},
	}
}
