package main

import (
	"context"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// point is one measurement.
type point struct{ x, y float64 }

// growth measures CPU per delivery against watchers and memory against objects, and plots both.
func growth(dir string) {
	delivery, memory := map[string][]point{}, map[string][]point{}
	for _, name := range []string{"kube-apiserver", "up"} {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), name) {
			continue
		}
		start := startReference
		if name == "up" {
			start = func(dir string) *server { return startUp(dir, name, *watershed) }
		}
		fresh := func(of string) *server {
			d := filepath.Join(dir, name+of)
			check(os.MkdirAll(d, 0o700))
			s := start(d)
			prepare(s)
			return s
		}
		s := fresh("-watchers")
		for _, w := range []struct{ watchers, rate, updates int }{{100, 40, 200}, {1000, 40, 200}, {10000, 4, 20}} {
			ctx, cancel := context.WithCancel(context.Background())
			ready, open := openWatches(ctx, s, w.watchers, everything)
			if ready {
				used, _ := s.deliveries(open, w.watchers, w.rate, w.updates)
				delivery[name] = append(delivery[name], point{float64(w.watchers), used})
				log.Printf("%-15s %6d watchers: %.1f CPU µs a delivery", name, w.watchers, used)
			} else {
				log.Printf("%-15s %6d watchers: they do not open within %v", name, w.watchers, openTimeout)
			}
			cancel()
			open.done.Wait()
		}
		s.stop()
		s = fresh("-objects") // a new process has no memory from the watches
		have := 0
		for _, objects := range []int{1000, 10000, 100000} {
			s.each("", objects-have, func(i int) {
				s.do("POST", "/api/v1/namespaces/more/configmaps", "",
					[]byte(fmt.Sprintf(
						`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"g%d"},"data":{"k":%q}}`, have+i,
						strings.Repeat("x", 1024))), 201)
			})
			have = objects
			s.do("GET", "/api/v1/namespaces/more/configmaps", "", nil, 200)
			time.Sleep(5 * time.Second) // the runtime returns freed memory
			now := s.memory()
			memory[name] = append(memory[name], point{float64(objects), now})
			log.Printf("%-15s %6d objects: %.0f MB", name, objects, now)
		}
		s.stop()
	}
	head := machine() + "; kube-apiserver 1.36.3 with default flags and `up`, each with an external etcd."
	plots := filepath.Join(filepath.Dir(*out), "performance")
	check(os.MkdirAll(plots, 0o755))
	check(os.WriteFile(filepath.Join(plots, "delivery.svg"),
		[]byte(plot("CPU µs to deliver a 1.3 KB event to one watcher", "watchers", delivery)), 0o644))
	check(os.WriteFile(filepath.Join(plots, "memory.svg"),
		[]byte(plot("Memory in MB after listing config maps of 1 KB", "objects", memory)), 0o644))
	text := head + "\n\n" + tableOf("watchers", "CPU µs a delivery", delivery) +
		"\n![CPU a delivery](performance/delivery.svg)\n\n" +
		tableOf("config maps of 1 KB", "MB", memory) + "\n![memory](performance/memory.svg)\n"
	fmt.Println(text)
	if *only == "" {
		check(writeBetween(*out, "<!-- growth -->", "<!-- grown -->", text))
	}
}

func tableOf(rowTitle, unit string, series map[string][]point) string {
	var b strings.Builder
	names := namesOf(series)
	fmt.Fprintf(&b, "| %s: %s |", rowTitle, unit)
	for _, n := range names {
		fmt.Fprintf(&b, " %s |", n)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(names)) + "\n")
	var xs []float64
	for _, n := range names {
		for _, p := range series[n] {
			if !slices.Contains(xs, p.x) {
				xs = append(xs, p.x)
			}
		}
	}
	slices.Sort(xs)
	for _, x := range xs {
		fmt.Fprintf(&b, "| %.0f |", x)
		for _, n := range names {
			cell := " |"
			for _, p := range series[n] {
				if p.x == x {
					cell = " " + plain(p.y) + " |"
				}
			}
			b.WriteString(cell)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func namesOf(series map[string][]point) []string {
	var names []string
	for n := range series {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// plot returns an SVG plot of series with a logarithmic x axis.
func plot(title, of string, series map[string][]point) string {
	const width, height, left, bottom, top = 640, 320, 60, 40, 40
	var lowest, highest, most = math.Inf(1), 0.0, 0.0
	for _, ps := range series {
		for _, p := range ps {
			lowest, highest, most = min(lowest, p.x), max(highest, p.x), max(most, p.y)
		}
	}
	most *= 1.1
	x := func(v float64) float64 {
		return left + (width-left-110)*(math.Log10(v)-math.Log10(lowest))/(math.Log10(highest)-math.Log10(lowest))
	}
	y := func(v float64) float64 { return height - bottom - (height-bottom-top)*v/most }
	var b strings.Builder
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12"><rect `+
			`width="100%%" height="100%%" fill="white"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%d" y="20" font-size="14">%s</text>`+"\n", left, title)
	for i := range 5 {
		v := most * float64(i) / 4
		fmt.Fprintf(&b,
			`<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" `+
				`text-anchor="end">%.3g</text>`+"\n", left, width-110, y(v), y(v), left-6, y(v)+4, v)
	}
	step := 10.0
	if highest < 10*lowest {
		step = 2
	}
	for v := lowest; v <= highest*1.01; v *= step {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.0f</text>`+"\n", x(v), height-bottom+18, v)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", (left+width-110)/2, height-6, of)
	for i, n := range namesOf(series) {
		colour := []string{"#c0392b", "#2471a3", "#1e8449"}[i%3]
		var line []string
		for _, p := range series[n] {
			line = append(line, fmt.Sprintf("%.1f,%.1f", x(p.x), y(p.y)))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x(p.x), y(p.y), colour)
		}
		last := series[n][len(series[n])-1]
		fmt.Fprintf(&b,
			`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/><text x="%.1f" y="%.1f" `+
				`fill="%s">%s</text>`+"\n", strings.Join(line, " "), colour, x(last.x)+8, y(last.y)+4, colour, n)
	}
	b.WriteString("</svg>\n")
	return b.String()
}
