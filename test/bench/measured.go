package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log"
	"maps"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// measured holds the results of each server by row, with one value per round.
type measured struct {
	servers []string
	rows    map[string]map[string]*sample
}

// sample holds a row's values, and the share of CPU time of each of the server's processes.
type sample struct {
	Values []float64 `json:"values"`
	// Shares are fractions of the work's CPU time, 0 to 1. It is nil for other rows, and for a server of one process.
	Shares map[string]float64 `json:"shares,omitempty"`

	seconds map[string]float64
}

func newMeasured(servers []string) *measured {
	return &measured{servers: servers, rows: map[string]map[string]*sample{}}
}

// record adds a round's value. used is the CPU time of the server's processes in the round.
func (m *measured) record(row, server string, value float64, used map[string]float64) {
	if m.rows[row] == nil {
		m.rows[row] = map[string]*sample{}
	}
	s := m.rows[row][server]
	if s == nil {
		s = &sample{}
		m.rows[row][server] = s
	}
	s.Values = append(s.Values, value)
	if len(used) > 1 && ofCPU(row) {
		if s.seconds == nil {
			s.seconds = map[string]float64{}
		}
		for name, seconds := range used {
			s.seconds[name] += seconds
		}
		s.Shares = shares(s.seconds)
	}
	log.Printf("%-70s %-15s %10s  %s", row, server, plain(value), byShare(s.Shares))
}

// ofCPU returns true if a row's unit is CPU time.
func ofCPU(row string) bool { return strings.Contains(row, "(CPU") }

// cpuRows returns the number of CPU-time rows among values.
func cpuRows(values map[string]float64) (n int) {
	for row := range values {
		if ofCPU(row) {
			n++
		}
	}
	return n
}

func shares(seconds map[string]float64) map[string]float64 {
	total := 0.0
	for _, s := range seconds {
		total += s
	}
	if total == 0 {
		return nil
	}
	of := map[string]float64{}
	for name, s := range seconds {
		of[name] = s / total
	}
	return of
}

// byShare formats shares in descending order, without shares below 1 %.
func byShare(of map[string]float64) string {
	names := slices.SortedFunc(maps.Keys(of), func(a, b string) int {
		return cmp.Or(cmp.Compare(of[b], of[a]), cmp.Compare(a, b))
	})
	var parts []string
	for _, n := range names {
		if of[n] >= 0.01 {
			parts = append(parts, fmt.Sprintf("%s %.0f %%", n, of[n]*100))
		}
	}
	return strings.Join(parts, " · ")
}

// median returns the median of values.
func median(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// percentile returns the p-th percentile of durations by the nearest rank, in milliseconds. It is 0 without durations.
func percentile(of []time.Duration, p int) float64 {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return ms(sorted[(len(of)*p+99)/100-1])
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// plain formats a number with three significant digits, without an exponent.
func plain(v float64) string {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(v))))
	if digits <= 0 {
		return strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', digits, 64), "0"), ".")
}

// cell formats a sample for the table: the median, and for several rounds the minimum and maximum.
func (s *sample) cell() string {
	if s == nil {
		return ""
	}
	if len(s.Values) == 1 {
		return plain(s.Values[0])
	}
	return fmt.Sprintf("%s (%s to %s)", plain(median(s.Values)), plain(slices.Min(s.Values)),
		plain(slices.Max(s.Values)))
}

// markdown returns the page's table.
func (m *measured) markdown(head string) string {
	var b strings.Builder
	b.WriteString(head + "\n\n| work |")
	for _, s := range m.servers {
		fmt.Fprintf(&b, " %s |", s)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(m.servers)) + "\n")
	rows := slices.Sorted(maps.Keys(m.rows))
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |", r)
		for _, s := range m.servers {
			fmt.Fprintf(&b, " %s |", m.rows[r][s].cell())
		}
		b.WriteString("\n")
	}
	begun := false
	for _, r := range rows {
		for _, s := range m.servers {
			if sample := m.rows[r][s]; sample != nil && sample.Shares != nil {
				if !begun {
					b.WriteString("\nWhere the processor time goes, by process:\n\n| work | of | |\n|---|---|---|\n")
					begun = true
				}
				fmt.Fprintf(&b, "| %s | %s | %s |\n", r, s, byShare(sample.Shares))
			}
		}
	}
	return b.String()
}

// document returns the results as JSON.
func (m *measured) document() ([]byte, error) {
	return json.MarshalIndent(map[string]any{
		"date":       time.Now().UTC().Format(time.DateOnly),
		"processors": runtime.NumCPU(),
		"go":         runtime.Version(),
		"pods":       *pods,
		"rounds":     *rounds,
		"rows":       m.rows,
	}, "", "  ")
}

// bars returns an SVG chart of the CPU-time rows, relative to the first server.
func (m *measured) bars() string {
	const width, left, right, step, top = 760, 330, 60, 34, 40
	colours := []string{"#c0392b", "#2471a3", "#1e8449"}
	var rows []string
	most := 1.0
	for _, r := range slices.Sorted(maps.Keys(m.rows)) {
		of := m.rows[r]
		if first := of[m.servers[0]]; !strings.Contains(r, "(CPU") || first == nil || median(first.Values) == 0 {
			continue
		}
		rows = append(rows, r)
		for _, s := range m.servers {
			if of[s] != nil {
				most = max(most, median(of[s].Values)/median(of[m.servers[0]].Values))
			}
		}
	}
	height := top + step*len(rows) + 10
	var b strings.Builder
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+
			`<rect width="100%%" height="100%%" fill="white"/>`+"\n", width, height)
	for i, s := range m.servers {
		fmt.Fprintf(&b, `<rect x="%d" y="12" width="10" height="10" fill="%s"/><text x="%d" y="21">%s</text>`+"\n",
			left+i*130, colours[i%len(colours)], left+i*130+14, s)
	}
	for i, r := range rows {
		y := top + i*step
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", left-8, y+16,
			strings.NewReplacer("&", "&amp;", "<", "&lt;").Replace(r))
		for j, s := range m.servers {
			sample := m.rows[r][s]
			if sample == nil {
				continue
			}
			ratio := median(sample.Values) / median(m.rows[r][m.servers[0]].Values)
			w := float64(width-left-right) * ratio / most
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="8" fill="%s"/>`+
				`<text x="%.1f" y="%d" font-size="9">%s</text>`+"\n",
				left, y+j*9, w, colours[j%len(colours)], float64(left)+w+4, y+j*9+8, plain(median(sample.Values)))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}
