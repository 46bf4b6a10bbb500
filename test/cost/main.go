// Command cost sends the same hostile requests to kube-apiserver and to Watershed, and compares their cost: status,
// CPU, peak memory, and the heap and goroutines that remain. Each difference is a finding; known.go holds the reason
// for each accepted finding. Servers run one after another. Their etcd is not measured.
package main

import (
	"flag"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"watershed.dev/test/harness"
)

// options select the shapes, the forms of Watershed and the timeout of a run.
type options struct {
	short bool
	forms string
	only  string
	page  string
	// settleTimeout is the longest wait for the memory that a shape left to be freed.
	settleTimeout time.Duration
}

func main() {
	testing.Init()
	o := options{}
	flag.BoolVar(&o.short, "short", false, "Send 20 shapes to `up` only, and do not change the page.")
	flag.StringVar(
		&o.forms,
		"forms",
		"",
		"Measure only these of kube-apiserver, up and split; the page has the values of the others.",
	)
	flag.StringVar(
		&o.only,
		"only",
		"",
		"Send only shapes whose \"family: name\" matches; the page keeps its other rows.",
	)
	flag.StringVar(
		&o.page,
		"page",
		filepath.Join(harness.Root(), "docs", "benchmarks", "cost.md"),
		"The page with the table; may be empty.",
	)
	flag.DurationVar(&o.settleTimeout, "settle-timeout", time.Minute, "The longest wait for freed memory.")
	flag.Parse()
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{
		Name: "cost",
		F:    func(t *testing.T) { run(t, o) },
	}}, nil, nil)
}

// kubeAPIServer is the form that is the reference.
const kubeAPIServer = "kube-apiserver"

// run measures every selected shape at kube-apiserver, then at each form of Watershed. It fails if a finding has no
// reason.
func run(t *testing.T, o options) {
	forms, settleTimeout := strings.Join(formsInOrder, ","), o.settleTimeout
	if o.short {
		forms, settleTimeout = kubeAPIServer+",up", 2*time.Second
	}
	if o.forms != "" {
		forms = o.forms
	}
	chosen := selected(o)
	if len(chosen) == 0 {
		t.Fatal("no shape is selected")
	}
	b := &bench{t: t, settleTimeout: settleTimeout, together: o.short, idle: map[string]time.Duration{},
		profiles: filepath.Join(harness.Root(), ".build", "cost")}
	if o.short {
		o.page = ""
	}
	all, err := earlier(o.page, chosen)
	if err != nil {
		t.Fatal(err)
	}
	for _, form := range strings.Split(forms, ",") {
		b.measureAll(form, chosen, all)
	}
	fmt.Println("\n" + all.table())
	for _, f := range all.findings() {
		if f.reason == "" {
			t.Errorf("finding: %s", f)
		} else {
			fmt.Printf("known: %s\n  because: %s\n", f, f.reason)
		}
	}
	if o.page != "" {
		if err := all.publish(o.page); err != nil {
			t.Error(err)
		}
	}
}

// selected returns the shapes that the options select.
func selected(o options) (chosen []*shape) {
	only := regexp.MustCompile(o.only)
	for _, s := range shapes() {
		if (!o.short || slices.Contains(shortForm, s.String())) && only.MatchString(s.String()) {
			chosen = append(chosen, s)
		}
	}
	return chosen
}
