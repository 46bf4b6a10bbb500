package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// results are costs by shape and form.
type results map[string]map[string]*result

// add adds the cost of a shape at a form.
func (r results) add(s *shape, form string, p *result) {
	if r[s.String()] == nil {
		r[s.String()] = map[string]*result{}
	}
	r[s.String()][form] = p
}

// formsInOrder are all forms, in the order of the table's cells.
var formsInOrder = []string{kubeAPIServer, "up", "split"}

// findings returns the findings of all forms, in the order of the shapes.
func (r results) findings() (all []finding) {
	for _, s := range shapes() {
		for _, form := range formsInOrder[1:] {
			theirs, ours := r[s.String()][kubeAPIServer], r[s.String()][form]
			if theirs != nil && ours != nil {
				all = append(all, judge(s, form, theirs, ours)...)
			}
		}
	}
	return all
}

// table returns a Markdown table: a row for each shape, with one value for each form in a cell.
func (r results) table() string {
	var b strings.Builder
	b.WriteString(
		"| shape | status | CPU, s | peak, MB | left, MB | goroutines | log, kB |\n|---|---|---|---|---|---|---|\n",
	)
	for _, s := range shapes() {
		prices := r[s.String()]
		if prices == nil {
			continue
		}
		cells := func(f func(*result) string) (all []string) {
			for _, form := range formsInOrder {
				if p := prices[form]; p != nil {
					all = append(all, f(p))
				}
			}
			return all
		}
		cell := func(f func(*result) string) string { return strings.Join(cells(f), " · ") }
		status := cells(func(p *result) string { return p.Status })
		if slices.Equal(status, slices.Repeat(status[:1], len(status))) {
			status = status[:1]
		}
		name := s.String()
		if s.about != "" {
			name += " (" + s.about + ")"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", name,
			strings.ReplaceAll(strings.Join(status, " · "), "|", `\|`),
			cell(func(p *result) string { return fmt.Sprintf("%.2f", p.CPU.Seconds()) }),
			cell(func(p *result) string { return fmt.Sprintf("%.0f", mb(p.Peak)) }),
			cell(func(p *result) string { return fmt.Sprintf("%.1f", max(0, mb(p.Left))) }),
			cell(func(p *result) string { return fmt.Sprint(max(0, p.Goroutines)) }),
			cell(func(p *result) string { return fmt.Sprintf("%.0f", float64(p.Logged)/1000) }))
	}
	return b.String()
}

// reasons returns a Markdown list of the findings with their reasons.
func (r results) reasons() string {
	var b strings.Builder
	for _, f := range r.findings() {
		reason := f.reason
		if reason == "" {
			reason = "**no reason yet**"
		}
		fmt.Fprintf(&b, "- %s: %s\n", f, reason)
	}
	if b.Len() == 0 {
		return "No findings.\n"
	}
	return "Findings:\n\n" + b.String()
}

const begin, end = "<!-- measured -->", "<!-- end -->"

// publish writes the table and the findings between the page's markers, and the values to measured.json. Rows of shapes
// that this run did not measure stay.
func (r results) publish(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(page), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", path, begin, end)
	}
	all, err := earlier(path, shapes())
	if err != nil {
		return err
	}
	maps.Copy(all, r)
	values, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return err
	}
	beside := valuesOf(path)
	if err := os.MkdirAll(filepath.Dir(beside), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(beside, append(values, '\n'), 0o644); err != nil {
		return err
	}
	text := fmt.Sprintf(
		"%s, %d processors, %s, %d shapes.\n\n%s\n%s",
		time.Now().UTC().Format(time.DateOnly),
		runtime.NumCPU(),
		runtime.Version(),
		len(all),
		all.table(),
		all.reasons(),
	)
	return os.WriteFile(path, []byte(head+begin+"\n"+text+end+tail), 0o644)
}

// valuesOf returns the path of the file with a page's values.
func valuesOf(page string) string {
	return filepath.Join(strings.TrimSuffix(page, ".md"), "measured.json")
}

// earlier returns a page's values of some shapes. It returns no values if the page is "" or has no values.
func earlier(page string, of []*shape) (results, error) {
	values, err := os.ReadFile(valuesOf(page))
	if page == "" || errors.Is(err, fs.ErrNotExist) {
		return results{}, nil
	}
	if err != nil {
		return nil, err
	}
	r := results{}
	if err := json.Unmarshal(values, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", valuesOf(page), err)
	}
	maps.DeleteFunc(r, func(name string, _ map[string]*result) bool {
		return !slices.ContainsFunc(of, func(s *shape) bool { return s.String() == name })
	})
	return r, nil
}
