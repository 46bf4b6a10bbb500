package e2e

import (
	"cmp"
	"encoding/json"
	"flag"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"watershed.dev/test/harness"
)

var rulesFile = flag.String("rules", "", "a file of Prometheus rules for kube-apiserver's metrics")

// ruleGroups are the parts of a file of Prometheus rules that the test reads.
type ruleGroups struct {
	Groups []ruleGroup `json:"groups"`
}

type ruleGroup struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Record      string            `json:"record,omitempty"`
	Alert       string            `json:"alert,omitempty"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// apiServerRules returns the groups of --rules that read kube-apiserver's metrics, without annotations.
func apiServerRules(t *testing.T) (out ruleGroups) {
	t.Helper()
	text, err := os.ReadFile(*rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		ruleGroups
		Spec ruleGroups `json:"spec"` // of a PrometheusRule
	}
	if err := yaml.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	for _, g := range append(all.Groups, all.Spec.Groups...) {
		if strings.Contains(g.Name, "apiserver") {
			for i := range g.Rules {
				g.Rules[i].Annotations = nil
			}
			out.Groups = append(out.Groups, g)
		}
	}
	if len(out.Groups) == 0 {
		t.Fatalf("%s has no rules of the API server", *rulesFile)
	}
	return out
}

// record returns the series of a server that rules read, as promtool's input_series. Each of the scrapes is a minute
// after the previous scrape, and has more traffic.
func record(t *testing.T, s *harness.Server, rules string) []map[string]string {
	t.Helper()
	const scrapes = 20
	client, err := rest.HTTPClientFor(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	sendMetricsTraffic(t, s)
	values := map[string][]string{"up": slices.Repeat([]string{"1"}, scrapes)}
	for i := range scrapes {
		for _, r := range metricsTraffic {
			if strings.Contains(r.path, "watch=") {
				continue
			}
			req, err := http.NewRequestWithContext(t.Context(), r.method, s.Config().Host+r.path,
				strings.NewReader(r.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", cmp.Or(r.contentType, "application/json"))
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		for line := range strings.Lines(scrape(t, s)) {
			space := strings.LastIndexByte(line, ' ')
			name, _, _ := strings.Cut(line[:max(space, 0)], "{")
			if line[0] == '#' || name == "" || !strings.Contains(rules, name) {
				continue
			}
			v := values[line[:space]]
			for len(v) < i {
				v = append(v, "_")
			}
			values[line[:space]] = append(v, strings.TrimSpace(line[space:]))
		}
	}
	var out []map[string]string
	for series, v := range values {
		name, labels, _ := strings.Cut(strings.TrimSuffix(series, "}"), "{")
		out = append(out, map[string]string{
			"series": name + `{job="apiserver",instance="a",` + labels + "}",
			"values": strings.Join(v, " "),
		})
	}
	return out
}

// answers evaluates rules over recorded series with promtool. It returns the alerts that fire, and the recorded series
// above zero. promtool only tests expectations, so each expectation is empty and its failure has the answer.
func answers(t *testing.T, rules ruleGroups, series []map[string]string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, v any) string {
		data, err := json.Marshal(v) // JSON is YAML
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	type test = map[string]any
	var exprs, alerts []test
	seen := map[string]bool{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if name := r.Record + r.Alert; !seen[name] {
				seen[name] = true
				if r.Alert != "" {
					alerts = append(alerts, test{"alertname": name, "eval_time": "19m"})
				} else {
					exprs = append(exprs, test{"expr": name, "eval_time": "19m"})
				}
			}
		}
	}
	path := write("test.yaml", test{
		"rule_files":          []string{write("rules.yaml", rules)},
		"evaluation_interval": "1m",
		"tests": []test{{
			"interval":         "1m",
			"input_series":     series,
			"promql_expr_test": exprs,
			"alert_rule_test":  alerts,
		}},
	})
	out, err := exec.Command(harness.Peer("promtool"), "test", "rules", path).CombinedOutput()
	all := map[string]string{}
	for _, m := range alertAnswer.FindAllStringSubmatch(string(out), -1) {
		for _, labels := range regexp.MustCompile(`Labels:(\{.*\})`).FindAllStringSubmatch(m[1], -1) {
			all[labels[1]] = "fires"
		}
	}
	for _, m := range exprAnswer.FindAllStringSubmatch(string(out), -1) {
		for _, sample := range sampleAnswer.FindAllStringSubmatch(m[1], -1) {
			resource := resourceLabel.FindStringSubmatch(sample[1])
			value, _ := strconv.ParseFloat(sample[2], 64)
			if value > leastAnswer && (resource == nil || slices.Contains(trafficResources, resource[1])) {
				all[sample[1]] = "is recorded"
			}
		}
	}
	if len(all) < 100 {
		t.Fatalf("promtool: %v: %d answers in %.2000s", err, len(all), out)
	}
	return all
}

// The output of promtool for an alert, for an expression, and for a sample of an expression.
var (
	alertAnswer   = regexp.MustCompile(`(?s)alertname: [^\n]*\n *exp:\[\],[^\n]*\n *got:\[(.*?)\n *\]`)
	exprAnswer    = regexp.MustCompile(`(?s)expr: "[^"]*", time: [^\n]*\n *exp: nil\n *got: ([^\n]*)`)
	sampleAnswer  = regexp.MustCompile(`(\{[^}]*\}) ([0-9.E+-]+)`)
	resourceLabel = regexp.MustCompile(`resource="([^"]*)"`)
)

// leastAnswer is above the rounding errors of a rate that is zero.
const leastAnswer = 1e-9

// trafficResources are the resources of metricsTraffic. Only the servers request other resources in the meantime.
var trafficResources = []string{"componentstatuses", "configmaps", "endpoints", "events", "gauges", "pods", "secrets",
	"selfsubjectaccessreviews", "serviceaccounts", "services"}

// TestRulesGiveTheSameAnswers evaluates recording rules and alerts, such as kubernetes-mixin's, with promtool over
// recorded scrapes of both servers. The same alerts fire, and the same series are recorded.
func TestRulesGiveTheSameAnswers(t *testing.T) {
	if *rulesFile == "" {
		t.Skip("-rules names no file")
	}
	rules := apiServerRules(t)
	text, err := json.Marshal(rules)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := harness.Twins(t)
	want := answers(t, rules, record(t, theirs, string(text)))
	got := answers(t, rules, record(t, ours, string(text)))
	fires := 0
	for answer, how := range want {
		if got[answer] != how {
			t.Errorf("%s %s with kube-apiserver only", answer, how)
		}
		if how == "fires" {
			fires++
		}
	}
	for answer, how := range got {
		if want[answer] != how {
			t.Errorf("%s %s with Watershed only", answer, how)
		}
	}
	t.Logf("%d groups of rules: %d alerts fire and %d series are recorded with kube-apiserver, %d answers with Watershed",
		len(rules.Groups), fires, len(want)-fires, len(got))
}
