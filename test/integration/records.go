package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// The results of a test, as go test -json names them.
const (
	pass    = "pass"
	failed  = "fail"
	skipped = "skip"
)

// results maps the tests of a package, with subtests, to their results.
type results map[string]string

// outcome is the result of a top-level test.
type outcome struct {
	result string
	// cases counts the passed tests without subtests: the test itself, or the leaves below it.
	cases int
}

// outcomes summarizes results by top-level test.
func (r results) outcomes() map[string]outcome {
	all := map[string]outcome{}
	for name, result := range r {
		top, _, _ := strings.Cut(name, "/")
		o := all[top]
		if name == top {
			o.result = result
		}
		if result == pass && r.leaf(name) {
			o.cases++
		}
		all[top] = o
	}
	return all
}

// leaf returns true if a test has no subtest.
func (r results) leaf(name string) bool {
	for other := range r {
		if strings.HasPrefix(other, name+"/") {
			return false
		}
	}
	return true
}

// causes returns the tests that failed without a failed subtest, and the skipped top-level tests, below a top-level
// test.
func (r results) causes(top string) (list []string) {
	if r[top] == skipped {
		return []string{top}
	}
	for name, result := range r {
		if result != failed || !within(name, top) {
			continue
		}
		own := true
		for other, result := range r {
			own = own && (result != failed || !strings.HasPrefix(other, name+"/"))
		}
		if own {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// within returns true if name is a test, or a subtest of it.
func within(name, test string) bool { return name == test || strings.HasPrefix(name, test+"/") }

// known is the reason for which a test passes with kube-apiserver only.
type known struct {
	pkg, test string
	// class is notBlackBox, declared, toMend or race.
	class  string
	reason string
}

// The classes of a reason.
const (
	notBlackBox = "not a black box"
	declared    = "declared difference"
	toMend      = "to mend"
	// race is a failure that another run may not have.
	race = "race"
)

// records are the files of record/.
type records struct {
	dir       string
	reference map[string]map[string]outcome
	ours      map[string]map[string]outcome
	known     []*known
}

func readRecords(dir string) (*records, error) {
	r := &records{dir: dir, reference: map[string]map[string]outcome{}, ours: map[string]map[string]outcome{}}
	for name, into := range map[string]map[string]map[string]outcome{
		"reference.tsv": r.reference, "watershed.tsv": r.ours,
	} {
		rows, err := readTable(filepath.Join(dir, name), 4)
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			cases, err := strconv.Atoi(row[3])
			if err != nil {
				return nil, fmt.Errorf("%s: %q: %w", name, row, err)
			}
			if into[row[0]] == nil {
				into[row[0]] = map[string]outcome{}
			}
			into[row[0]][row[1]] = outcome{row[2], cases}
		}
	}
	rows, err := readTable(filepath.Join(dir, "known.tsv"), 4)
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		if !slices.Contains([]string{notBlackBox, declared, toMend, race}, row[2]) {
			return nil, fmt.Errorf("known.tsv: %q has no class", row)
		}
		r.known = append(r.known, &known{pkg: row[0], test: row[1], class: row[2], reason: row[3]})
	}
	return r, nil
}

// readTable reads lines of tab-separated columns. A file that does not exist has no lines.
func readTable(path string, columns int) (rows [][]string, err error) {
	b, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSuffix(line, "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		row := strings.Split(line, "\t")
		if len(row) != columns {
			return nil, fmt.Errorf("%s: %q has %d columns, want %d", path, line, len(row), columns)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// addReference records the results of kube-apiserver, and writes the file, because a reference takes long to make.
func (r *records) addReference(pkg string, results results) error {
	r.reference[pkg] = merge(r.reference[pkg], results.outcomes())
	return writeOutcomes(filepath.Join(r.dir, "reference.tsv"), r.reference)
}

// merge replaces the outcomes of the tests that ran.
func merge(old, now map[string]outcome) map[string]outcome {
	all := maps.Clone(old)
	if all == nil {
		all = map[string]outcome{}
	}
	maps.Copy(all, now)
	return all
}

// compare records the results of Watershed. It returns the tests that pass with kube-apiserver only, without a known
// reason, and the reasons of tests that pass.
func (r *records) compare(pkg string, results results) (problems []error) {
	outcomes := results.outcomes()
	r.ours[pkg] = merge(r.ours[pkg], outcomes)
	for _, top := range slices.Sorted(maps.Keys(outcomes)) {
		if r.reference[pkg][top].result != pass {
			continue
		}
		causes := results.causes(top)
		for _, cause := range causes {
			if !r.explain(pkg, cause) {
				problems = append(problems, fmt.Errorf("%s %s: passes with kube-apiserver only", pkg, cause))
			}
		}
		if len(causes) > 0 {
			continue
		}
		for _, k := range r.known {
			if k.pkg == pkg && within(k.test, top) && k.class != race {
				problems = append(problems, fmt.Errorf("%s %s: passes, but has the reason %q", pkg, k.test, k.reason))
			}
		}
	}
	return problems
}

// unexplained returns the top-level tests that fail without a known reason, and pass with kube-apiserver.
func (r *records) unexplained(pkg string, results results) (tops []string) {
	for _, top := range slices.Sorted(maps.Keys(results.outcomes())) {
		if r.reference[pkg][top].result == pass && results[top] == failed &&
			slices.ContainsFunc(results.causes(top), func(cause string) bool { return !r.explain(pkg, cause) }) {
			tops = append(tops, top)
		}
	}
	return tops
}

// replace replaces the results of the top-level tests that ran a second time.
func (r results) replace(second results) {
	maps.DeleteFunc(r, func(name, _ string) bool {
		top, _, _ := strings.Cut(name, "/")
		return second[top] != ""
	})
	maps.Copy(r, second)
}

// explain returns true if a failed test, or a test above it, has a known reason.
func (r *records) explain(pkg, test string) bool {
	for _, k := range r.known {
		if k.pkg == pkg && within(test, k.test) {
			return true
		}
	}
	return false
}

// write writes the results of Watershed, and the page that shows them.
func (r *records) write() error {
	if err := writeOutcomes(filepath.Join(r.dir, "watershed.tsv"), r.ours); err != nil {
		return err
	}
	return r.publish("../docs/operators/upstream-tests.md")
}

func writeOutcomes(path string, all map[string]map[string]outcome) error {
	var b bytes.Buffer
	b.WriteString("# Written by make integration. Package, test, result, and passed cases.\n")
	for _, pkg := range slices.Sorted(maps.Keys(all)) {
		for _, test := range slices.Sorted(maps.Keys(all[pkg])) {
			o := all[pkg][test]
			fmt.Fprintf(&b, "%s\t%s\t%s\t%d\n", pkg, test, o.result, o.cases)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o600)
}

// selected returns the packages of a list or of names.
func selected(names string) []string {
	if list, ok := lists[names]; ok {
		return list
	}
	return strings.Split(names, ",")
}

var lists = map[string][]string{
	"short": {"dryrun", "etcd", "controlplane/audit", "apiserver/anonymous"},
	"all": {
		"apiserver/apply", "apiserver", "etcd", "auth", "apiserver/cel", "apiserver/admissionwebhook", "controlplane",
		"controlplane/transformation", "controlplane/audit", "client", "garbagecollector", "dryrun", "apimachinery",
		"apimachinery/apply", "apiserver/anonymous", "apiserver/certreload", "apiserver/discovery",
		"apiserver/egressselector", "apiserver/flowcontrol", "apiserver/httpproxy", "apiserver/oidc",
		"apiserver/openapi", "apiserver/podlogs", "apiserver/portforward", "apiserver/tracing", "certificates",
		"clustertrustbundles", "dualstack", "namespace", "network", "podcertificaterequests", "quota", "service",
		"servicecidr", "serviceaccount", extensions, extensions + "/conversion",
	},
}
