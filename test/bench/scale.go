package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	scaleWrites   = 4000
	scaleWatchers = 1000
	scaleRounds   = 3

	rowWrite    = "CPU of a write (ms)"
	rowDelivery = "CPU of a delivery (µs)"
)

// scale measures `split` with 1 to 4 registries and with 1 to 8 watchfanout replicas. It plots the CPU of a write and
// of a delivery. Replicas on the same processors have no higher throughput, so the cost shows how well they scale. The
// cost includes the work of each replica without requests, and each watchfanout replica reads each event.
func scale(dir string) {
	at := func(service string, replicas int, measure func(s *server) map[string]float64) map[string]float64 {
		d := filepath.Join(dir, service+strconv.Itoa(replicas))
		check(os.MkdirAll(d, 0o700))
		s := startPlacement("split", d, "split", *watershed, "--replicas", fmt.Sprintf("%s=%d", service, replicas))
		defer s.stop()
		prepare(s)
		rounds := map[string][]float64{}
		for range scaleRounds {
			for row, v := range measure(s) {
				rounds[row] = append(rounds[row], v)
			}
		}
		measured := map[string]float64{"memory of all processes (MB)": s.memory()}
		for row, values := range rounds {
			measured[row] = median(values)
		}
		log.Printf("%d %s: %v", replicas, service, measured)
		return measured
	}
	writes, deliveries := map[string][]point{}, map[string][]point{}
	add := func(to map[string][]point, replicas int, measured map[string]float64) {
		for row, v := range measured {
			to[row] = append(to[row], point{float64(replicas), v})
		}
	}
	for _, n := range []int{1, 2, 4} {
		add(writes, n, at("registry", n, createMany))
	}
	for _, n := range []int{1, 2, 4, 8} {
		add(deliveries, n, at("watchfanout", n, deliverToDifferent))
	}
	plots := filepath.Join(filepath.Dir(*out), "performance")
	draw := func(name, row, of string, all map[string][]point) {
		svg := plot(row, of, map[string][]point{"split": all[row]})
		check(os.WriteFile(filepath.Join(plots, name), []byte(svg), 0o644))
	}
	draw("writes.svg", rowWrite, "registries", writes)
	draw("deliveries.svg", rowDelivery, "watchfanout replicas", deliveries)
	text := fmt.Sprintf("%s, `split`, medians of %d rounds, memory at the end. "+
		"Processes and clients share the processors. The CPU includes the work of idle replicas.\n\n",
		machine(), scaleRounds) +
		tableOf("registries", fmt.Sprintf("%d ConfigMaps of 1 KB are created", scaleWrites), writes) +
		"\n![CPU of a write](performance/writes.svg)\n\n" +
		tableOf("watchfanout replicas", fmt.Sprintf("events for %d different watches", scaleWatchers), deliveries) +
		"\n![CPU of a delivery](performance/deliveries.svg)\n"
	fmt.Println(text)
	check(writeBetween(*out, "<!-- scale -->", "<!-- scaled -->", text))
}

// createMany measures writes of 16 clients.
func createMany(s *server) map[string]float64 {
	run, began := serial.Add(1), time.Now()
	rows := s.each(rowWrite, scaleWrites, func(i int) {
		s.do("POST", "/api/v1/namespaces/more/configmaps", "", []byte(fmt.Sprintf(
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"s%d-%d"},"data":{"k":%q}}`, run, i,
			strings.Repeat("x", 900))), 201)
	})
	rows["writes a second"] = scaleWrites / time.Since(began).Seconds()
	return rows
}

// deliverToDifferent measures events of which each watch has its own stream, because no two watches have the same
// label selector.
func deliverToDifferent(s *server) map[string]float64 {
	ctx, cancel := context.WithCancel(context.Background())
	different := func(i int) string { return fmt.Sprintf("&labelSelector=!x%d", i) }
	ready, open := openWatches(ctx, s, scaleWatchers, different)
	if !ready {
		log.Fatalf("%s: the watches do not open", s.name)
	}
	before := s.usage()
	used, _ := s.deliveries(open, scaleWatchers, 20, 200)
	tier := s.usage()["watchfanout"] - before["watchfanout"]
	cancel()
	open.done.Wait()
	return map[string]float64{
		rowDelivery: used,
		"CPU of a delivery in the watchfanout replicas (µs)": tier * 1e6 / float64(open.delivered.Load()),
		"age of an event on arrival, p99 (ms)":               percentile(open.ages, 99),
	}
}
