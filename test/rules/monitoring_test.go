package rules

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"
	"sigs.k8s.io/yaml"

	"watershed.dev/test/harness"
)

// monitoring returns a file of deploy/monitoring.
func monitoring(t *testing.T, elem ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{harness.Root(), "deploy", "monitoring"}, elem...)...))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

type alertGroups struct {
	Groups []struct {
		Rules []struct {
			Alert, Expr         string
			Labels, Annotations map[string]string
		}
	}
}

// knownMetrics returns the names of the metrics of Watershed, kube-apiserver, etcd, and of every scraped Go process.
// kube-apiserver's names are in a list of all components of Kubernetes, and etcd's in its source.
// docs/operators/metrics.md has the metrics of kube-apiserver that Watershed lacks.
func knownMetrics(t *testing.T) map[string]bool {
	t.Helper()
	known := map[string]bool{"process_resident_memory_bytes": true, "process_cpu_seconds_total": true, "up": true}
	for _, metrics := range declaredMetrics(t) {
		for _, m := range metrics {
			known[m.name] = true
		}
	}
	full := func(parts ...string) string {
		return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "_")
	}
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes", "go.etcd.io/etcd/server/v3")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	kubernetes, etcd, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	documented, err := os.ReadFile(filepath.Join(kubernetes, "test/instrumentation/documentation/documentation-list.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var list []struct {
		Name, Namespace, Subsystem string
		ComponentEndpoints         []struct{ Component string }
	}
	if err := yaml.Unmarshal(documented, &list); err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		for _, e := range m.ComponentEndpoints {
			if e.Component == "kube-apiserver" {
				known[full(m.Namespace, m.Subsystem, m.Name)] = true
			}
		}
	}
	missing, _, _ := strings.Cut(page(t, "operators/metrics.md"), "The rules and alerts")
	for _, row := range regexp.MustCompile(`(?m)^\|(.*)\| missing: `).FindAllStringSubmatch(missing, -1) {
		for name := range strings.SplitSeq(row[1], ",") {
			delete(known, strings.Trim(name, " `"))
		}
	}
	for _, file := range []string{
		"etcdserver", "etcdserver/api/rafthttp", "storage", "storage/wal", "storage/mvcc", "storage/backend",
	} {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(etcd, file, "metrics.go"), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if opts, ok := n.(*ast.CompositeLit); ok {
				fields := map[string]string{}
				for _, e := range opts.Elts {
					if field, ok := e.(*ast.KeyValueExpr); ok {
						if name, ok := field.Key.(*ast.Ident); ok {
							fields[name.Name] = text(field.Value)
						}
					}
				}
				known[full(fields["Namespace"], fields["Subsystem"], fields["Name"])] = true
			}
			return true
		})
	}
	return known
}

// checkQuery checks that a query parses, and that the metrics in it exist.
func checkQuery(t *testing.T, known map[string]bool, where, query string) {
	t.Helper()
	query = strings.ReplaceAll(query, "$__rate_interval", "5m")
	parsed, err := metricsql.Parse(query)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	found := false
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		m, ok := e.(*metricsql.MetricExpr)
		if !ok {
			return
		}
		for _, filters := range m.LabelFilterss {
			for _, f := range filters {
				if f.Label != "__name__" {
					continue
				}
				found = true
				series := regexp.MustCompile("_(bucket|count|sum)$").ReplaceAllString(f.Value, "")
				if !known[f.Value] && !known[series] {
					t.Errorf("%s: the metric %s does not exist", where, f.Value)
				}
			}
		}
	})
	if !found {
		t.Errorf("%s: %s has no metric", where, query)
	}
}

// TestEveryAlertHasARunbook compares the alerts with the sections of docs/operators/runbooks.md, and their metrics with
// the metrics that exist.
func TestEveryAlertHasARunbook(t *testing.T) {
	var alerts alertGroups
	if err := yaml.Unmarshal(monitoring(t, "alerts.yaml"), &alerts); err != nil {
		t.Fatal(err)
	}
	var rule struct{ Spec alertGroups }
	if err := yaml.Unmarshal(monitoring(t, "prometheusrule.yaml"), &rule); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(alerts, rule.Spec) {
		t.Error("prometheusrule.yaml is older than alerts.yaml: run `make manifests`")
	}
	sections := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## (\w+)\n\n\S`).FindAllStringSubmatch(page(t, "operators/runbooks.md"), -1) {
		sections[m[1]] = true
	}
	known := knownMetrics(t)
	for _, g := range alerts.Groups {
		for _, r := range g.Rules {
			if want := "docs/operators/runbooks.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
				t.Errorf("%s: runbook_url %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
			}
			if !sections[r.Alert] {
				t.Errorf("%s has no section in docs/operators/runbooks.md", r.Alert)
			}
			delete(sections, r.Alert)
			if r.Labels["severity"] == "" || r.Annotations["summary"] == "" {
				t.Errorf("%s has no severity or no summary", r.Alert)
			}
			checkQuery(t, known, r.Alert, r.Expr)
		}
	}
	for _, s := range slices.Sorted(maps.Keys(sections)) {
		t.Errorf("docs/operators/runbooks.md has a section of %s, which is no alert", s)
	}
}

// TestDashboardsShowMetricsThatExist checks the queries of Grafana's dashboards, and their kustomization.
func TestDashboardsShowMetricsThatExist(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(harness.Root(), "deploy", "monitoring", "dashboards", "*.json"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%v: %v", files, err)
	}
	kustomization := string(monitoring(t, "kustomization.yaml"))
	known := knownMetrics(t)
	if !known["apiserver_request_total"] || known["kubelet_running_pods"] || known["scheduler_pending_pods"] {
		t.Error("the known metrics are not those of kube-apiserver")
	}
	for _, file := range files {
		name := filepath.Base(file)
		if !strings.Contains(kustomization, "- dashboards/"+name+"\n") {
			t.Errorf("deploy/monitoring/kustomization.yaml does not list %s", name)
		}
		var dashboard struct {
			UID    string
			Panels []struct {
				ID                 int
				Title, Description string
				Targets            []struct{ Expr string }
			}
		}
		if err := json.Unmarshal(monitoring(t, "dashboards", name), &dashboard); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if dashboard.UID != "watershed-"+strings.TrimSuffix(name, ".json") || len(dashboard.Panels) < 8 {
			t.Errorf("%s: uid %q, %d panels", name, dashboard.UID, len(dashboard.Panels))
		}
		ids := map[int]bool{}
		for _, p := range dashboard.Panels {
			if ids[p.ID] || p.Description == "" || len(p.Targets) == 0 {
				t.Errorf("%s: panel %q has the id of another panel, no description, or no query", name, p.Title)
			}
			ids[p.ID] = true
			for _, target := range p.Targets {
				checkQuery(t, known, name+": "+p.Title, target.Expr)
			}
		}
	}
}
