package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// coefficients are the costs that `watershed capacity` adds up, measured with `split`. Each map is by service.
type coefficients struct {
	Date       string `json:"date"`
	Processors int    `json:"processors"`
	Go         string `json:"go"`
	// CPU is processor time by operation, in microseconds.
	CPU map[string]map[string]float64 `json:"cpu"`
	// Publisher is the processor time of publishing an event, in microseconds. It is a part of the registry's CPU.
	Publisher float64 `json:"publisher"`
	// Process is the memory of an idle process in megabytes, and Idle its use of a core.
	Process map[string]float64 `json:"process"`
	Idle    map[string]float64 `json:"idle"`
	// Object is the memory of an object in each replica of a service, in kilobytes.
	Object map[string]map[string]float64 `json:"object"`
	// Watch is the memory of a watch in all replicas of a service together, in kilobytes.
	Watch map[string]map[string]float64 `json:"watch"`
}

// idleTime is how long the processor time of idle processes is measured.
const idleTime = 10 * time.Second

// twoOfEach are the replicas of a measurement. Each other service has a single process.
const twoOfEach = "gateway=2,registry=2,watchfanout=2"

// measureCoefficients measures all coefficients, and writes them to a file.
func measureCoefficients(dir, file string) {
	fresh := func(of string) *server {
		d := filepath.Join(dir, of)
		check(os.MkdirAll(d, 0o700))
		s := startPlacement("split", d, "split", *watershed, "--replicas", twoOfEach)
		prepare(s)
		time.Sleep(5 * time.Second) // work after the start ends
		s.measureIdle()
		return s
	}
	c := &coefficients{Date: time.Now().UTC().Format(time.DateOnly), Processors: runtime.NumCPU(),
		Go: runtime.Version(), CPU: map[string]map[string]float64{}, Object: map[string]map[string]float64{},
		Watch: map[string]map[string]float64{}}
	s := fresh("operations")
	c.measureOperations(s)
	s.stop()
	s = fresh("shared-watches")
	c.measureWatches(s, "shared", everything)
	s.stop()
	s = fresh("own-watches")
	c.measureWatches(s, "of its own", ofAbsentName)
	s.stop()
	s = fresh("pods")
	c.measureObjects(s, "Pod of 7.6 KB", 10_000, "/api/v1/namespaces/more/pods", func(i int) []byte {
		return pod(fmt.Sprintf("o%d", i))
	})
	s.stop()
	s = fresh("config-maps")
	c.measureObjects(s, "ConfigMap of 1 KB", 50_000, "/api/v1/namespaces/more/configmaps", func(i int) []byte {
		return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"g%d"},"data":{"k":%q}}`, i,
			strings.Repeat("x", 1024))
	})
	s.stop()
	c.round()
	data, err := json.MarshalIndent(c, "", "  ")
	check(err)
	check(os.WriteFile(file, append(data, '\n'), 0o644))
	fmt.Println(string(data))
}

// measureOperations measures idle processes, writes, lists and deliveries.
func (c *coefficients) measureOperations(s *server) {
	c.Process, c.Idle = s.processes(), map[string]float64{}
	for name, n := range s.counts() {
		c.Idle[name] = s.idle[name] / n
	}
	c.CPU["update a Lease"] = s.used(2*2000, func() { renewLeases(s); renewLeases(s) })
	publisher := s.publisher()
	c.CPU["create a ConfigMap"] = s.used(2*1000, func() { createConfigMaps(s); createConfigMaps(s) })
	c.Publisher = (s.publisher() - publisher) * 1e6 / (2 * 1000)
	c.CPU["create a Pod"] = s.used(2*500, func() { createPods(s); createPods(s) })
	list := func() int { return len(s.do("GET", "/api/v1/namespaces/more/pods", "", nil, 200)) }
	megabytes := float64(list()) / 1e6
	time.Sleep(5 * time.Second) // the watch tier loads the pods
	c.CPU["list a megabyte"] = s.used(20*megabytes, func() {
		for range 20 {
			list()
		}
	})
	alone := s.used(watchedEvents, s.createSlowly)
	_, closeAll := s.openAll(1000, everything)
	shared := s.watchCost(alone, 1000)
	closeAll()
	delete(shared, "watchfanout") // it sends the event once to each gateway, however many watches are equal
	c.CPU["deliver to a watch shared"] = shared
	_, closeAll = s.openAll(200, func(i int) string { // which every event matches
		return fmt.Sprintf("&fieldSelector=metadata.name!%%3Dw%d", i)
	})
	c.CPU["deliver to a watch of its own"] = s.watchCost(alone, 200)
	closeAll()
}

// measureWatches measures the memory and the processor time of open watches, whose queries differ by query.
func (c *coefficients) measureWatches(s *server, name string, query func(i int) string) {
	const n = 5000
	s.createSlowly() // the first events of a resource need memory that is not of the watches
	before, idle := s.heaps(), s.idle
	_, closeAll := s.openAll(n, query)
	defer closeAll()
	c.Watch[name] = s.growth(before, n, false)
	s.measureIdle()
	hold := map[string]float64{}
	for _, service := range watchPath {
		hold[service] = max(0, s.idle[service]-idle[service]) * 1e6 / n
	}
	c.CPU["hold a watch "+name] = hold
}

// measureObjects measures the memory of objects in each process, after a read of each resource.
func (c *coefficients) measureObjects(s *server, name string, n int, path string, object func(i int) []byte) {
	before := s.heaps()
	s.each("", n, func(i int) { s.do("POST", path, "", object(i), 201) })
	s.do("GET", path+"?limit=1", "", nil, 200)
	c.Object[name] = s.growth(before, float64(n), true)
}

// round rounds all costs to three digits.
func (c *coefficients) round() {
	c.Publisher = rounded(c.Publisher)
	all := []map[string]float64{c.Process, c.Idle}
	for _, costs := range []map[string]map[string]float64{c.CPU, c.Object, c.Watch} {
		all = slices.AppendSeq(all, maps.Values(costs))
	}
	for _, of := range all {
		for name, v := range of {
			of[name] = rounded(v)
		}
	}
}

func rounded(v float64) float64 {
	n, err := strconv.ParseFloat(plain(v), 64)
	check(err)
	return n
}

// used returns the processor time of an operation in microseconds, by service, if do performs n of them. The processor
// time of idle processes is subtracted.
func (s *server) used(n float64, do func()) map[string]float64 {
	before, began := s.usage(), time.Now()
	do()
	used, took := s.usage(), time.Since(began).Seconds()
	for name, seconds := range used {
		used[name] = max(0, seconds-before[name]-s.idle[name]*took) * 1e6 / n
	}
	log.Printf("%v", used)
	return used
}

// measureIdle measures the use of cores by the services without work.
func (s *server) measureIdle() {
	before := s.usage()
	time.Sleep(idleTime)
	s.idle = s.usage()
	for name := range s.idle {
		s.idle[name] = (s.idle[name] - before[name]) / idleTime.Seconds()
	}
}

// watchPath are the services that hold watches. The others have no work with a delivery.
var watchPath = []string{"gateway", "watchfanout"}

// watchedEvents is the number of events whose cost to watches is measured.
const watchedEvents = 200

// createSlowly creates ConfigMaps, 40 a second, so that no event waits for another.
func (s *server) createSlowly() {
	tick := time.NewTicker(time.Second / 40)
	defer tick.Stop()
	for range watchedEvents {
		<-tick.C
		s.do("POST", "/api/v1/namespaces/events/configmaps", "", fmt.Appendf(nil,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"e%d"},"data":{"pad":%q}}`, serial.Add(1),
			strings.Repeat("x", 900)), 201)
	}
	time.Sleep(time.Second) // until each watch has the events
}

// watchCost returns the processor time that an event costs the watch path for each of n open watches, in microseconds.
// alone is the cost of an event without them.
func (s *server) watchCost(alone map[string]float64, n float64) map[string]float64 {
	used, of := s.used(watchedEvents, s.createSlowly), map[string]float64{}
	for _, name := range watchPath {
		of[name] = max(0, used[name]-alone[name]) / n
	}
	log.Printf("%v", of)
	return of
}

// processes returns the anonymous memory of a process in megabytes, by service.
func (s *server) processes() map[string]float64 {
	of, n := map[string]float64{}, s.counts()
	for pid, name := range s.pids() {
		of[name] += resident(pid, "RssAnon:") / n[name]
	}
	return of
}

// counts returns the number of processes by service.
func (s *server) counts() map[string]float64 {
	of := map[string]float64{}
	for _, name := range s.pids() {
		of[name]++
	}
	return of
}

// publisher returns the processor time of the busier registry beyond the other's, in seconds. Both serve equal shares
// of the requests, and either publishes.
func (s *server) publisher() float64 {
	var of []float64
	for pid, name := range s.pids() {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && name == "registry" {
			of = append(of, secondsOf(b))
		}
	}
	return slices.Max(of) - slices.Min(of)
}

// openAll opens watches. closeAll closes them.
func (s *server) openAll(n int, query func(i int) string) (open *watches, closeAll func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ready, open := openWatches(ctx, s, n, query)
	if !ready {
		log.Fatalf("%s: the watches do not open", s.name)
	}
	return open, func() { cancel(); open.done.Wait() }
}

// heaps returns the heap at which each process collects its garbage next, in megabytes by process, after a collection.
// It holds the live objects and the garbage that the process may keep (GOGC). The stacks are added.
func (s *server) heaps() map[string]float64 {
	of := map[string]float64{}
	configs, _ := filepath.Glob(filepath.Join(s.dir, "config", "*.yaml"))
	for _, config := range configs {
		b, err := os.ReadFile(config)
		check(err)
		socket := regexp.MustCompile(`debug-address: (\S+)`).FindSubmatch(b)
		if socket == nil {
			continue
		}
		client := &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", string(socket[1]))
			},
		}}
		name := strings.TrimSuffix(filepath.Base(config), ".yaml")
		for range 2 { // finalizers free memory for the second collection
			resp, err := client.Get("http://process/debug/pprof/heap?gc=1&debug=1")
			check(err)
			profile, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			check(err)
			of[name] = 0
			for _, line := range regexp.MustCompile(`(?m)^# (?:NextGC|Stack) = (\d+)`).FindAllSubmatch(profile, -1) {
				n, err := strconv.ParseFloat(string(line[1]), 64)
				check(err)
				of[name] += n / 1e6
			}
		}
		client.CloseIdleConnections()
	}
	return of
}

// growth returns the growth of the heaps since before by service, divided by n: the mean of a service's processes, or
// their sum.
func (s *server) growth(before map[string]float64, n float64, mean bool) map[string]float64 {
	of, processes := map[string]float64{}, map[string]float64{}
	for name, megabytes := range s.heaps() {
		service := serviceOf(name)
		of[service] += (megabytes - before[name]) * 1000 / n
		processes[service]++
	}
	for service, kilobytes := range of {
		if mean {
			kilobytes /= processes[service]
		}
		of[service] = max(0, kilobytes) // noise may make it negative
	}
	log.Printf("%v", of)
	return of
}
