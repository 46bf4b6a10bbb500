package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// report counts and stores the differences.
type report struct {
	mu              sync.Mutex
	phase           string
	requests, equal map[string]int
	listed          map[*difference]int
	unexplained     []finding
	codes           map[int]int
	// known are the accepted differences.
	known []*difference
}

type finding struct {
	phase   string
	r       *request
	a, b    answer
	details []string
}

func newReport(known []*difference) *report {
	return &report{
		known:    known,
		requests: map[string]int{},
		equal:    map[string]int{},
		listed:   map[*difference]int{},
		codes:    map[int]int{},
	}
}

func (p *report) begin(phase string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.phase = phase
}

func (p *report) compare(r *request, a, b answer) {
	if r.lost {
		return
	}
	details := diff(a, b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests[p.phase]++
	p.codes[a.code]++
	var left []string
	for _, w := range details {
		if d := p.explained(r, a, b, w); d != nil {
			p.listed[d]++
		} else {
			left = append(left, w)
		}
	}
	if len(left) == 0 {
		p.equal[p.phase]++
		return
	}
	p.unexplained = append(p.unexplained, finding{p.phase, r, a, b, left})
}

// add adds the differences of another report, whose comparisons have ended.
func (p *report) add(o *report) {
	p.mu.Lock()
	defer p.mu.Unlock()
	addCounts(p.requests, o.requests)
	addCounts(p.equal, o.equal)
	addCounts(p.listed, o.listed)
	addCounts(p.codes, o.codes)
	p.unexplained = append(p.unexplained, o.unexplained...)
}

func addCounts[K comparable](to, from map[K]int) {
	for k, n := range from {
		to[k] += n
	}
}

// write prints a summary, and writes every finding to a file.
func (p *report) write(dir string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	total, equal := 0, 0
	for _, phase := range slices.Sorted(maps.Keys(p.requests)) {
		fmt.Printf("%-12s %6d requests, %6d equal\n", phase, p.requests[phase], p.equal[phase])
		total, equal = total+p.requests[phase], equal+p.equal[phase]
	}
	fmt.Printf("kube-apiserver's answers:")
	for _, c := range slices.Sorted(maps.Keys(p.codes)) {
		fmt.Printf(" %d×%d", p.codes[c], c)
	}
	fmt.Println()
	for _, d := range p.known {
		note := ""
		if p.listed[d] == 0 && d.absence != "" {
			note = " (" + d.absence + ")"
		}
		fmt.Printf("listed %5d× %s%s\n", p.listed[d], d.name, note)
	}
	var b strings.Builder
	groups := map[string][]finding{}
	for _, f := range p.unexplained {
		key := mask(strings.Join(f.details[:1], ""))
		if i := strings.Index(key, ":"); i > 0 && len(key) > 160 {
			key = key[:160]
		}
		groups[key] = append(groups[key], f)
	}
	for _, key := range slices.SortedFunc(maps.Keys(groups), func(x, y string) int {
		return len(groups[y]) - len(groups[x])
	}) {
		group := groups[key]
		fmt.Fprintf(&b, "=== %d× %s\n", len(group), key)
		for i, f := range group {
			if i == 3 {
				break
			}
			fmt.Fprintf(&b, "  [%s: %s] %s\n", f.phase, f.r.about, f.r)
			if len(f.r.body) > 0 {
				fmt.Fprintf(&b, "    %v %.600q\n", f.r.header, f.r.body)
			}
			for _, w := range f.details[:min(8, len(f.details))] {
				fmt.Fprintf(&b, "    %s\n", w)
			}
			if i == 0 {
				fmt.Fprintf(&b, "    theirs: %d %.900s\n    ours:   %d %.900s\n", f.a.code,
					f.a.body, f.b.code, f.b.body)
			}
		}
	}
	path := filepath.Join(dir, "differences.txt")
	if err := os.MkdirAll(dir, 0o755); err == nil {
		_ = os.WriteFile(path, []byte(b.String()), 0o644)
	}
	if len(groups) > 0 {
		fmt.Print(b.String()[:min(b.Len(), 6000)])
	}
	fmt.Printf("%d requests, %d equal, %d listed differences, %d unexplained (%d kinds, in %s)\n", total, equal,
		sum(p.listed), len(p.unexplained), len(groups), path)
}

func sum(m map[*difference]int) (n int) {
	for _, c := range m {
		n += c
	}
	return n
}
