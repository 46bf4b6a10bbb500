package e2e

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// family is a metric in a scrape: its type and the names of its labels.
type family struct{ kind, labels string }

var (
	typeLine   = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	seriesLine = regexp.MustCompile(`(?m)^([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} \S+$`)
	labelName  = regexp.MustCompile(`(?:^|,)([a-zA-Z_]\w*)="`)
)

// scrape returns a server's /metrics.
func scrape(t *testing.T, s *harness.Server) string {
	t.Helper()
	code, text := s.Get("/metrics")
	if code != http.StatusOK {
		t.Fatalf("/metrics: %d %s", code, text)
	}
	return text
}

// scrapeSplit returns the /metrics of all processes of `split`.
func scrapeSplit(t *testing.T, s *harness.Server) (all string) {
	t.Helper()
	for _, process := range []string{"gateway-0", "gateway-1", "authn-0", "authz-0", "admission-0", "registry-0",
		"registry-1", "watchfanout-0", "watchfanout-1"} {
		resp, err := s.Debug(process).Get("http://" + process + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		all += string(text)
	}
	return all
}

// families returns the metrics of a scrape by name.
func families(text string) map[string]family {
	all, labels := map[string]family{}, map[string]map[string]bool{}
	for _, m := range typeLine.FindAllStringSubmatch(text, -1) {
		all[m[1]], labels[m[1]] = family{kind: m[2]}, map[string]bool{}
	}
	for _, m := range seriesLine.FindAllStringSubmatch(text, -1) {
		name := m[1]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, ok := strings.CutSuffix(name, suffix); ok && labels[base] != nil {
				name = base
			}
		}
		for _, l := range labelName.FindAllStringSubmatch(m[2], -1) {
			labels[name][l[1]] = true
		}
	}
	for name, f := range all {
		f.labels = strings.Join(slices.Sorted(maps.Keys(labels[name])), ",")
		all[name] = f
	}
	return all
}

// metricsDefinitions are the objects whose use has metrics: a custom resource, a policy, a webhook that nothing serves,
// and an aggregated server that does not respond.
const metricsDefinitions = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gauges.metrics.example.com}
spec:
  group: metrics.example.com
  scope: Namespaced
  names: {plural: gauges, singular: gauge, kind: Gauge}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        x-kubernetes-preserve-unknown-fields: true
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: metrics}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "object.metadata.name != 'rejected'"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: metrics}
spec: {policyName: metrics, validationActions: [Deny]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: metrics}
webhooks:
- name: metrics.example.com
  clientConfig: {url: "https://127.0.0.1:1/"}
  failurePolicy: Ignore
  sideEffects: None
  admissionReviewVersions: [v1]
  matchConditions: [{name: own, expression: "object.metadata.name == 'hooked'"}]
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.absent.example.com}
spec:
  group: absent.example.com
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {name: absent, namespace: metrics}
`

// metricsTraffic are the requests after which the metrics of both servers are compared, as METHOD path, and a body.
var metricsTraffic = []struct{ method, path, contentType, body string }{
	{method: "GET", path: "/api"},
	{method: "GET", path: "/apis"},
	{method: "GET", path: "/openapi/v2"},
	{method: "GET", path: "/openapi/v3"},
	{method: "GET", path: "/openapi/v3/api/v1"},
	{method: "GET", path: "/readyz"},
	{method: "GET", path: "/version"},
	{method: "GET", path: "/no/such/page"},
	{method: "GET", path: "/api/v1/componentstatuses"},
	{method: "GET", path: "/api/v1/endpoints"},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps", body: `{"metadata":{"name":"a","labels":{"l":"x"}}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps", body: `{"metadata":{"name":"b"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps", body: `{"metadata":{"name":"a"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps", body: `{"metadata":{"name":"hooked"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps", body: `{"metadata":{"name":"rejected"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/configmaps?dryRun=All&fieldValidation=Strict",
		body: `{"metadata":{"name":"dry"}}`},
	{method: "PUT", path: "/api/v1/namespaces/metrics/configmaps/a",
		body: `{"metadata":{"name":"a","labels":{"l":"x"}},"data":{"k":"v"}}`},
	{method: "PUT", path: "/api/v1/namespaces/metrics/configmaps/a",
		body: `{"metadata":{"name":"a","resourceVersion":"1"}}`},
	{method: "PATCH", path: "/api/v1/namespaces/metrics/configmaps/a", body: `{"data":{"k":"w"}}`,
		contentType: "application/merge-patch+json"},
	{method: "PATCH", path: "/api/v1/namespaces/metrics/configmaps/a", body: `{"data":{"k":"x"}}`,
		contentType: "application/strategic-merge-patch+json"},
	{method: "PATCH", path: "/api/v1/namespaces/metrics/configmaps/a",
		body:        `[{"op":"add","path":"/data/n","value":"1"}]`,
		contentType: "application/json-patch+json"},
	{method: "PATCH", path: "/api/v1/namespaces/metrics/configmaps/c?fieldManager=m",
		body:        `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"},"data":{"k":"v"}}`,
		contentType: "application/apply-patch+yaml"},
	{method: "GET", path: "/api/v1/namespaces/metrics/configmaps/a"},
	{method: "GET", path: "/api/v1/namespaces/metrics/configmaps/absent"},
	{method: "GET", path: "/api/v1/namespaces/metrics/configmaps"},
	{method: "GET", path: "/api/v1/configmaps?resourceVersion=0"},
	{method: "GET", path: "/api/v1/configmaps?limit=1"},
	{method: "GET", path: "/api/v1/configmaps?resourceVersion=1&resourceVersionMatch=NotOlderThan"},
	{method: "GET", path: "/api/v1/namespaces/metrics/configmaps?labelSelector=l%3Dx"},
	{method: "GET", path: "/api/v1/configmaps?watch=1&timeoutSeconds=1"},
	{method: "GET", path: "/api/v1/configmaps?watch=1&timeoutSeconds=1&resourceVersion=0"},
	{method: "GET", path: "/api/v1/configmaps?watch=1&timeoutSeconds=10&sendInitialEvents=true&allowWatchBookmarks=true" +
		"&resourceVersionMatch=NotOlderThan"},
	{method: "POST", path: "/apis/metrics.example.com/v1/namespaces/metrics/gauges",
		body: `{"apiVersion":"metrics.example.com/v1","kind":"Gauge","metadata":{"name":"g"}}`},
	{method: "GET", path: "/apis/metrics.example.com/v1/gauges"},
	{method: "GET", path: "/apis/metrics.example.com/v1/gauges?watch=1&timeoutSeconds=5&resourceVersion=0"},
	{method: "GET", path: "/apis/absent.example.com/v1/anything"},
	{method: "POST", path: "/api/v1/namespaces/metrics/secrets", body: `{"metadata":{"name":"s"},"data":{"k":"djE="}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/events", body: `{"metadata":{"name":"e"},` +
		`"involvedObject":{"namespace":"metrics","kind":"ConfigMap","name":"a"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/services",
		body: `{"metadata":{"name":"s"},"spec":{"type":"NodePort","ports":[{"port":80}]}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/serviceaccounts", body: `{"metadata":{"name":"robot"}}`},
	{method: "POST", path: "/api/v1/namespaces/metrics/pods",
		body: `{"metadata":{"name":"p"},"spec":{"serviceAccountName":"robot","nodeName":"absent",` +
			`"containers":[{"name":"c","image":"i"}]}}`},
	{method: "GET", path: "/api/v1/pods?fieldSelector=spec.nodeName%3Dabsent"},
	{method: "GET", path: "/api/v1/namespaces/metrics/pods/p/log"},
	{method: "POST", path: "/api/v1/namespaces/metrics/pods/p/exec?command=true&stdout=true"},
	{method: "POST", path: "/api/v1/namespaces/metrics/pods/p/eviction",
		body: `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p"}}`},
	{method: "POST", path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body: `{"kind":` +
		`"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1",` +
		`"spec":{"nonResourceAttributes":{"path":"/","verb":"get"}}}`},
	{method: "DELETE", path: "/api/v1/namespaces/metrics/configmaps/b"},
	{method: "DELETE", path: "/api/v1/namespaces/metrics/configmaps/b",
		body: `{"apiVersion":"v1","kind":"DeleteOptions","gracePeriodSeconds":0}`},
	{method: "DELETE", path: "/api/v1/namespaces/metrics/configmaps?labelSelector=l%3Dx",
		body: `{"apiVersion":"v1","kind":"DeleteOptions"}`},
}

// sendMetricsTraffic sends metricsTraffic, and requests as other users. It returns the status of each response.
func sendMetricsTraffic(t *testing.T, s *harness.Server) (statuses []string) {
	t.Helper()
	s.Kubectl("create", "namespace", "metrics")
	s.Apply(metricsDefinitions)
	s.Kubectl("wait", "--timeout=2m", "--for=condition=Established", "crd/gauges.metrics.example.com")
	harness.Eventually(t, harness.Soon, func() error { // the policy's first effect
		code, _ := s.Get("/apis/metrics.example.com/v1/gauges")
		_, err := s.TryKubectl("", "-n", "metrics", "create", "configmap", "rejected", "--dry-run=server")
		if code != http.StatusOK || err == nil {
			return fmt.Errorf("the custom resource responds %d, and the policy %v", code, err)
		}
		return nil
	})
	client, err := harness.HTTPClient(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	send := func(client *http.Client, method, path, contentType, body string, header ...string) {
		req, err := http.NewRequestWithContext(t.Context(), method, s.Config().Host+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		statuses = append(statuses, fmt.Sprintf("%s %s: %d", method, path, resp.StatusCode))
	}
	for _, r := range metricsTraffic {
		if r.contentType == "" {
			r.contentType = "application/json"
		}
		send(client, r.method, r.path, r.contentType, r.body)
	}
	send(client, "GET", "/api/v1/pods", "", "", "Impersonate-User", "alice")
	send(client, "GET", "/api/v1/pods", "", "", "Accept-Encoding", "gzip")
	token := strings.TrimSpace(s.Kubectl("-n", "metrics", "create", "token", "robot"))
	config := rest.AnonymousClientConfig(s.Config())
	for _, bearer := range []string{token, "invalid", ""} {
		config.BearerToken = bearer
		c, err := harness.HTTPClient(config)
		if err != nil {
			t.Fatal(err)
		}
		send(c, "GET", "/api/v1/namespaces/metrics/configmaps", "", "")
	}
	return statuses
}

// acceptedMetrics returns the accepted differences of metrics, with their reasons: the rows of a table in
// docs/operators/metrics.md.
func acceptedMetrics(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(harness.Root(), "docs", "operators", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	accepted := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*`) \\| (.*) \\|$").FindAllStringSubmatch(string(page), -1) {
		for _, name := range strings.Split(row[1], ", ") {
			accepted[strings.Trim(name, "`")] = row[2]
		}
	}
	return accepted
}

// TestMetricsAreThoseOfKubeAPIServer compares the names, types and labels of all metrics of both servers after the same
// requests. docs/operators/metrics.md lists the accepted differences, and each of its rows must apply.
func TestMetricsAreThoseOfKubeAPIServer(t *testing.T) {
	t.Parallel()
	const poll = "--etcd-count-metric-poll-period=1s"
	theirs, up := harness.Twins(t, poll)
	statuses := sendMetricsTraffic(t, theirs)
	if got := sendMetricsTraffic(t, up); !slices.Equal(got, statuses) { // the counts differ for good
		t.Fatalf("the responses are\n%q, and kube-apiserver's\n%q", got, statuses)
	}
	compareMetrics(t, theirs, func() string { return scrape(t, up) })
	for _, series := range sameValues {
		harness.Eventually(t, harness.Soon, func() error {
			a, b := valueOf(scrape(t, theirs), series), valueOf(scrape(t, up), series)
			if a == "" || a != b {
				return fmt.Errorf("%s is %q, and kube-apiserver's %q", series, b, a)
			}
			return nil
		})
	}
	up.Stop()
	split := harness.Split(t, "", poll)
	sendMetricsTraffic(t, split)
	compareMetrics(t, theirs, func() string { return scrapeSplit(t, split) })
}

// sameValues are series whose values depend on the traffic only.
var sameValues = []string{
	`apiserver_resource_objects{group="metrics.example.com",resource="gauges"}`,
	`apiserver_storage_events_received_total{group="metrics.example.com",resource="gauges"}`,
	`apiserver_watch_events_total{group="metrics.example.com",resource="gauges",version="v1"}`,
	`apiserver_watch_events_sizes_sum{group="metrics.example.com",resource="gauges",version="v1"}`,
	`apiserver_watch_list_duration_seconds_count{group="",resource="configmaps",scope="cluster",version="v1"}`,
	`apiserver_request_body_size_bytes_sum{group="metrics.example.com",resource="gauges",verb="create"}`,
	`apiserver_request_body_size_bytes_count{group="",resource="configmaps",verb="delete_collection"}`,
	`apiserver_watch_cache_events_received_total{group="metrics.example.com",resource="gauges"}`,
	`apiserver_init_events_total{group="metrics.example.com",resource="gauges"}`,
	`apiserver_requested_deprecated_apis{group="",removed_release="",resource="endpoints",subresource="",version="v1"}`,
	`aggregator_unavailable_apiservice{name="v1.absent.example.com"}`,
	`apiserver_request_total{code="404",component="apiserver",dry_run="",group="",resource="pods",scope="resource",` +
		`subresource="log",verb="CONNECT",version="v1"}`,
	`serviceaccount_valid_tokens_total`,
}

// valueOf returns the value of a series in a scrape. It is empty if the scrape has no such series.
func valueOf(text, series string) string {
	_, rest, _ := strings.Cut(text, "\n"+series+" ")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// compareMetrics compares the metrics of kube-apiserver and of Watershed.
func compareMetrics(t *testing.T, theirs *harness.Server, ours func() string) {
	t.Helper()
	accepted, log := acceptedMetrics(t), ""
	harness.Eventually(t, harness.Soon, func() error { // several metrics are recorded periodically
		same := 0
		differences := map[string]string{}
		own := families(ours())
		for name, want := range families(scrape(t, theirs)) {
			switch got, ok := own[name]; {
			case !ok:
				differences[name] = "is missing"
			case got != want:
				differences[name] = fmt.Sprintf("is %+v, and kube-apiserver's %+v", got, want)
			default:
				same++
			}
		}
		log = fmt.Sprintf("%d metrics are the same, and %d differ", same, len(differences))
		var wrong []string
		for name, d := range differences {
			if accepted[name] == "" {
				wrong = append(wrong, name+" "+d)
			}
		}
		for name := range accepted {
			if differences[name] == "" {
				wrong = append(wrong, name+" is listed in docs/operators/metrics.md, and does not differ")
			}
		}
		if slices.Sort(wrong); len(wrong) > 0 {
			return errors.New(strings.Join(wrong, "\n"))
		}
		return nil
	})
	t.Log(log)
}
