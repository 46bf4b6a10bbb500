package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

func render(results map[string]map[string][]float64, servers []*server) string {
	var rows []string
	for r := range results {
		rows = append(rows, r)
	}
	slices.Sort(rows)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, %d pods, medians of %d rounds. kube-apiserver 1.36.3 with default "+
		"flags; external etcd 3.6 for kube-apiserver and `up`.\n\n| work |", time.Now().UTC().Format("2006-01-02"),
		runtime.NumCPU(), runtime.Version(), *pods, *rounds)
	for _, s := range servers {
		fmt.Fprintf(&b, " %s |", s.name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(servers)) + "\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |", r)
		for _, s := range servers {
			v := results[r][s.name]
			slices.Sort(v)
			fmt.Fprintf(&b, " %.3g |", v[len(v)/2])
		}
		b.WriteString("\n")
	}
	return b.String()
}

const begin, end = "<!-- measured -->", "<!-- end -->"

// write puts the table between the page's marks.
func write(table string) error { return writeBetween(begin, end, table) }

func writeBetween(begin, end, text string) error {
	page, err := os.ReadFile(*out)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(page), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", *out, begin, end)
	}
	return os.WriteFile(*out, []byte(head+begin+"\n"+text+end+tail), 0o644)
}
