package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// results are the prices of shapes by form, kube-apiserver's first.
type results struct {
	shapes []*shape
	forms  []string
	prices map[string]map[*shape]*result
}

func newResults(shapes []*shape) *results {
	return &results{shapes: shapes, prices: map[string]map[*shape]*result{}}
}

func (r *results) add(form string, prices map[*shape]*result) {
	r.forms = append(r.forms, form)
	r.prices[form] = prices
}

func (r *results) of(form string) map[*shape]*result { return r.prices[form] }

// findings returns the findings of all forms in the order of the shapes.
func (r *results) findings() (all []finding) {
	for _, s := range r.shapes {
		for _, form := range r.forms[1:] {
			all = append(all, judge(s, form, r.prices[kubeAPIServer][s], r.prices[form][s])...)
		}
	}
	return all
}

// table is Markdown: a row for each shape, with a value for each form in a cell.
func (r *results) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, %d shapes. Each cell has %s.\n\n", time.Now().UTC().Format(time.DateOnly),
		runtime.NumCPU(), runtime.Version(), len(r.shapes), strings.Join(r.forms, " · "))
	b.WriteString("| shape | status | CPU, s | peak, MB | left, MB | goroutines | log, kB |\n|---|---|---|---|---|---|---|\n")
	for _, s := range r.shapes {
		cell := func(f func(*result) string) string {
			var all []string
			for _, form := range r.forms {
				all = append(all, f(r.prices[form][s]))
			}
			return strings.Join(all, " · ")
		}
		status := cell(func(p *result) string { return p.status })
		if same := slices.Compact(strings.Split(status, " · ")); len(same) == 1 {
			status = same[0]
		}
		name := s.String()
		if s.about != "" {
			name += ": " + s.about
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", name, strings.ReplaceAll(status, "|", "\\|"),
			cell(func(p *result) string { return fmt.Sprintf("%.2f", p.cpu.Seconds()) }),
			cell(func(p *result) string { return fmt.Sprintf("%.0f", mb(p.peak)) }),
			cell(func(p *result) string { return fmt.Sprintf("%.1f", max(0, mb(p.left))) }),
			cell(func(p *result) string { return fmt.Sprint(max(0, p.goroutines)) }),
			cell(func(p *result) string { return fmt.Sprintf("%.0f", float64(p.logged)/1000) }))
	}
	return b.String()
}

const begin, end = "<!-- measured -->", "<!-- end -->"

// publish puts the table and the findings between the page's marks.
func (r *results) publish(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(page), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", path, begin, end)
	}
	text := r.table() + "\n" + r.reasons() + "\n"
	return os.WriteFile(path, []byte(head+begin+"\n"+text+end+tail), 0o644)
}

// reasons is a Markdown list of the findings, each with its reason.
func (r *results) reasons() string {
	var b strings.Builder
	for _, f := range r.findings() {
		reason := f.reason
		if reason == "" {
			reason = "no reason yet"
		}
		fmt.Fprintf(&b, "- %s: %s\n", f, reason)
	}
	if b.Len() == 0 {
		return "No findings.\n"
	}
	return "Findings:\n\n" + b.String()
}
