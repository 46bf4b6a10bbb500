package rules

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

var updateMetrics = flag.Bool("update-metrics", false, "write docs/operators/metrics.md")

// metric is a metric that Watershed declares itself.
type metric struct{ name, kind, help, labels string }

// declaredMetrics returns the metrics of each part (a service, platform, or a command) in the order of their names.
func declaredMetrics(t *testing.T) map[string][]metric {
	t.Helper()
	out := git(t, "ls-files", "platform/*.go", "services/*.go", "cmd/*.go", ":!*_test.go")
	all := map[string][]metric{}
	for _, file := range strings.Fields(out) {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(harness.Root(), file), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		part := strings.Split(file, "/")[0]
		switch {
		case strings.HasPrefix(file, "platform/watchcache/"):
			part = "watchfanout" // it exposes the library's metrics
		case part != "platform":
			part = strings.Split(file, "/")[1]
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && len(call.Args) > 0 {
				if m := metricOf(call); m.name != "" {
					all[part] = append(all[part], m)
				}
			}
			return true
		})
	}
	for _, metrics := range all {
		slices.SortFunc(metrics, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	}
	return all
}

// metricOf returns the metric that a call declares, if it declares one. Such a call is
// prometheus.NewCounterVec(prometheus.CounterOpts{Name, Help}, labels), or prometheus.NewDesc(name, help, labels, nil).
func metricOf(call *ast.CallExpr) (m metric) {
	fun, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !strings.HasPrefix(fun.Sel.Name, "New") {
		return m
	}
	m.kind = strings.ToLower(strings.NewReplacer("New", "", "Vec", "", "Func", "").Replace(fun.Sel.Name))
	if fun.Sel.Name == "NewDesc" && len(call.Args) > 2 {
		m.kind, m.name, m.help = "gauge or counter", text(call.Args[0]), text(call.Args[1])
	}
	if opts, ok := call.Args[0].(*ast.CompositeLit); ok {
		for _, e := range opts.Elts {
			if field, ok := e.(*ast.KeyValueExpr); ok {
				switch fmt.Sprint(field.Key) {
				case "Name":
					m.name = text(field.Value)
				case "Help":
					m.help = text(field.Value)
				}
			}
		}
	}
	for _, arg := range call.Args[1:] {
		if labels, ok := arg.(*ast.CompositeLit); ok {
			var names []string
			for _, e := range labels.Elts {
				names = append(names, text(e))
			}
			m.labels = strings.Join(names, ", ")
		}
	}
	if !strings.HasPrefix(m.name, "watershed_") {
		m.name = ""
	}
	return m
}

// text returns the value of an expression of string literals.
func text(e ast.Expr) (s string) {
	ast.Inspect(e, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			part, _ := strconv.Unquote(lit.Value)
			s += part
		}
		return true
	})
	return s
}

// units are the words in the help of a metric, by the end of its name.
var units = map[string]string{"seconds": "in seconds", "bytes": "Bytes", "revision": "revision of etcd"}

// targetLabels are the labels of a target of a PodMonitor. Prometheus renames a metric's label of such a name.
var targetLabels = []string{"container", "endpoint", "instance", "job", "namespace", "pod"}

// TestTheMetricsReference compares docs/operators/metrics.md with the code. -update-metrics writes it.
func TestTheMetricsReference(t *testing.T) {
	const begin, end = "<!-- generated -->\n", "<!-- /generated -->"
	page := filepath.Join(harness.Root(), "docs", "operators", "metrics.md")
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(content), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no generated part", page)
	}
	var out bytes.Buffer
	all := declaredMetrics(t)
	count := 0
	for _, part := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&out, "### %s\n\n", part)
		for _, m := range all[part] {
			count++
			if unit := units[m.name[strings.LastIndex(m.name, "_")+1:]]; !strings.Contains(m.help, unit) {
				t.Errorf("the help of %s does not say %q", m.name, unit)
			}
			for label := range strings.SplitSeq(m.labels, ", ") {
				if slices.Contains(targetLabels, label) {
					t.Errorf("%s has the label %s, which Prometheus overwrites: name it by its subject", m.name, label)
				}
			}
			fmt.Fprintf(&out, "- `%s` (%s", m.name, m.kind)
			if m.labels != "" {
				fmt.Fprintf(&out, " by %s", m.labels)
			}
			fmt.Fprintf(&out, "): %s\n", m.help)
		}
		out.WriteString("\n")
	}
	if count < 50 {
		t.Errorf("%d metrics are declared", count)
	}
	want := head + begin + out.String() + end + tail
	if *updateMetrics {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(content) != want {
		t.Errorf("%s is older than the code: run `make docs`", page)
	}
}
