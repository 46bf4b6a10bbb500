package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
)

// The marks of the generated part of the page.
const (
	begin = "<!-- measured -->\n"
	end   = "<!-- end -->\n"
)

// publish replaces the generated part of a page: a row for each package, and the reasons.
func (r *records) publish(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	from, to := bytes.Index(page, []byte(begin)), bytes.Index(page, []byte(end))
	if from < 0 || to < from {
		return fmt.Errorf("%s has no %q before %q", path, begin, end)
	}
	text := slices.Concat(page[:from+len(begin)], []byte(r.tables()), page[to:])
	return os.WriteFile(path, text, 0o600)
}

// row has the counts of a package.
type row struct {
	tests, upstream, ours, cases int
	// reasons counts the tests that pass with kube-apiserver only, by class.
	reasons map[string]int
}

func (r *row) add(o row) {
	r.tests, r.upstream, r.ours, r.cases = r.tests+o.tests, r.upstream+o.upstream, r.ours+o.ours, r.cases+o.cases
	for class, n := range o.reasons {
		r.reasons[class] += n
	}
}

func (r *row) line(name string) string {
	return fmt.Sprintf("| %s | %d | %d | %d | %d | %d | %d | %d |\n", name, r.tests, r.upstream, r.ours, r.cases,
		r.reasons[notBlackBox], r.reasons[declared], r.reasons[toMend]+r.reasons[race])
}

func (r *records) row(pkg string) row {
	count := row{reasons: map[string]int{}}
	for test, o := range r.reference[pkg] {
		count.tests++
		if o.result != pass {
			continue
		}
		count.upstream++
		if ours := r.ours[pkg][test]; ours.result == pass {
			count.ours++
			count.cases += ours.cases
			continue
		}
		count.reasons[r.class(pkg, test)]++
	}
	return count
}

// class returns the class of the reason for which a top-level test fails. Of several classes, toMend comes first.
func (r *records) class(pkg, test string) string {
	class := notBlackBox
	for _, k := range r.known {
		if k.pkg == pkg && (within(k.test, test) || within(test, k.test)) && k.class != notBlackBox && class != toMend {
			class = k.class
		}
	}
	return class
}

func (r *records) tables() string {
	var b bytes.Buffer
	b.WriteString("| package | tests | kube-apiserver passes | Watershed passes | cases of these | not black boxes | " +
		"declared differences | to mend, races |\n|---|--:|--:|--:|--:|--:|--:|--:|\n")
	sum := row{reasons: map[string]int{}}
	for _, pkg := range slices.Sorted(maps.Keys(r.ours)) {
		one := r.row(pkg)
		b.WriteString(one.line(pkg))
		sum.add(one)
	}
	b.WriteString(sum.line("all"))
	b.WriteString("\n| test | class | reason |\n|---|---|---|\n")
	for _, k := range r.known {
		fmt.Fprintf(&b, "| %s %s | %s | %s |\n", k.pkg, k.test, k.class, k.reason)
	}
	return b.String()
}
