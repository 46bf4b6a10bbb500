// Command bench measures Watershed and kube-apiserver with the same work in alternation, each with a fresh etcd of
// equal settings. CPU is the servers' user and system time, without the client's and etcd's. For Watershed it is the
// sum over all processes and NATS. The command prints a table, and writes it to docs/benchmarks/performance.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	bin       = flag.String("bin", ".build/bin", "The directory of kube-apiserver and etcd.")
	watershed = flag.String("watershed", "bin/watershed", "The binary under test.")
	baseline  = flag.String("baseline", "",
		"Another binary to measure beside the binary under test, to show the effect of a change.")
	pods   = flag.Int("pods", 10000, "The number of pods in the lists.")
	rounds = flag.Int("rounds", 3, "The number of rounds; the table has the medians.")
	out    = flag.String("out", "../docs/benchmarks/performance.md", "The page whose table is replaced.")
	only   = flag.String("only", "", "Servers to measure, comma separated; all by default.")
	grow   = flag.Bool("growth", false,
		"Measure instead how the cost of a delivery grows with watchers, and memory with objects; plots go to "+
			"docs/benchmarks/performance/.")
	with = flag.String("with", "", "Flags that kube-apiserver and Watershed get beside their own, separated by spaces; "+
		"{server} in one stands for each one's name.")
	page = flag.Bool("page", false, "Rewrite the page even if only a part was measured.")
	rows = flag.String("rows", "",
		"Measure only work whose name has one of these in it, comma separated; the page is then left alone.")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if flag.Arg(0) == loudTenantCommand {
		runLoudTenant(flag.Args()[1:])
		return
	}
	dir, err := os.MkdirTemp("", "wsbench")
	check(err)
	defer os.RemoveAll(dir)
	if *grow {
		growth(dir)
		return
	}
	var servers []*server
	for _, k := range kinds() {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), k.of) {
			continue
		}
		d := filepath.Join(dir, strings.ReplaceAll(k.name, " ", "-"))
		check(os.MkdirAll(d, 0o700))
		s := k.start(d)
		defer s.stop()
		servers = append(servers, s)
	}
	var names []string
	for _, s := range servers {
		names = append(names, s.name)
	}
	results := newMeasured(names)
	for _, s := range servers {
		results.record(rowIdle, s.name, s.memory(), nil)
		prepare(s)
	}
	wanted := slices.DeleteFunc(slices.Clone(work), func(w piece) bool {
		return !slices.ContainsFunc(strings.Split(*rows, ","), func(r string) bool { return strings.Contains(w.name, r) })
	})
	for round := range *rounds {
		for i, w := range wanted {
			log.Printf("round %d of %d, %d of %d: %s", round+1, *rounds, i+1, len(wanted), w.name)
			for _, s := range servers {
				before := s.usage()
				values := w.do(s)
				used := s.usage()
				for name := range used {
					used[name] -= before[name]
				}
				if cpuRows(values) > 1 {
					used = nil // the processes' shares of each row are unknown
				}
				for row, v := range values {
					results.record(row, s.name, v, used)
				}
			}
		}
	}
	for _, s := range servers {
		results.record(rowServed, s.name, s.memory(), nil)
	}
	table := results.markdown(fmt.Sprintf("%s, %d processors, %s, %d pods, medians of %d rounds with the least and the "+
		"most. kube-apiserver 1.36.3 with default flags; each with an etcd 3.6 of its own, over TLS.",
		time.Now().UTC().Format(time.DateOnly), runtime.NumCPU(), runtime.Version(), *pods, *rounds))
	fmt.Println(table)
	if *rows == "" && *only == "" || *page {
		check(publish(results, table))
	}
}

// kind is a kind of server to measure. of is its name in -only.
type kind struct {
	of, name string
	start    func(dir string) *server
}

// kinds returns all kinds, in the order of the table's columns.
func kinds() []kind {
	all := []kind{{"kube-apiserver", "kube-apiserver", startReference}}
	binaries := []struct{ suffix, path string }{{"", *watershed}}
	if *baseline != "" {
		binaries = []struct{ suffix, path string }{{" before", *baseline}, {"", *watershed}}
	}
	for _, of := range []struct {
		name  string
		start func(dir, name, binary string) *server
	}{{"up", startUp}, {"split", startSplit}} {
		for _, b := range binaries {
			name := of.name + b.suffix
			all = append(all, kind{of.name, name, func(dir string) *server { return of.start(dir, name, b.path) }})
		}
	}
	return all
}

const (
	rowIdle   = "memory when idle (MB)"
	rowServed = "memory with the pods served (MB)"
)

// piece is one piece of work. do runs it and returns values by row.
type piece struct {
	name string
	do   func(*server) map[string]float64
}

// work is the list of work. The servers alternate within each piece.
var work = []piece{
	{"LIST pods, JSON", func(s *server) map[string]float64 {
		return s.lists("LIST pods, JSON (CPU ms/MB)", "application/json", 0)
	}},
	{"LIST pods, protobuf", func(s *server) map[string]float64 {
		return s.lists("LIST pods, protobuf (CPU ms/MB)", "application/vnd.kubernetes.protobuf", 0)
	}},
	{"LIST pods, Table", func(s *server) map[string]float64 {
		return s.lists("LIST pods, Table (CPU ms/MB)", "application/json;as=Table;v=v1;g=meta.k8s.io", 0)
	}},
	{"LIST pods, gzip", (*server).compressedLists},
	{"LIST pages of 500, JSON", func(s *server) map[string]float64 {
		return s.lists("LIST pages of 500, JSON (CPU ms/MB)", "application/json", 500)
	}},
	{"GET a pod", getPods},
	{"GET a pod again", getPodsAgain},
	{"update a Lease", updateLeases},
	{"create a ConfigMap", createConfigMaps},
	{"create a pod", createPods},
	{"create by a token's user", admitted},
	{"a consistent LIST of one small object", smallList},
	{"deliver to 1000", func(s *server) map[string]float64 { return deliver(s, 1000, 40, 200) }},
	{"deliver to 5000", func(s *server) map[string]float64 { return deliver(s, 5000, 10, 50) }},
	{"herd", herd},
	{"definitions", definitions},
	{"a relist storm", storm},
	{"a loud tenant", tenant},
}

// podsRead is the number of pods that a row reads.
const podsRead = 2000

// getPods reads pods that no request has read before. After the last pod it starts again.
func getPods(s *server) map[string]float64 {
	s.firstRead = s.read
	s.read += podsRead
	return s.each("GET a pod, JSON (CPU ms)", podsRead, s.readPod)
}

// getPodsAgain reads the pods of the previous read again.
func getPodsAgain(s *server) map[string]float64 {
	if s.read == 0 {
		getPods(s)
	}
	return s.each("GET a pod that was read before, JSON (CPU ms)", podsRead, s.readPod)
}

func (s *server) readPod(i int) {
	s.do("GET", fmt.Sprintf("/api/v1/namespaces/bench/pods/p%d", (s.firstRead+i)%*pods), "", nil, 200)
}

// replicasWarm is the number of lists after which very likely every replica has served one.
const replicasWarm = 6

func (s *server) lists(row, accept string, limit int) map[string]float64 {
	for range replicasWarm { // each replica caches the response that it has served once
		s.list(s.client, accept, limit)
	}
	before, megabytes := s.cpu(), 0.0
	for range 5 {
		megabytes += float64(s.list(s.client, accept, limit)) / 1e6
	}
	return map[string]float64{row: (s.cpu() - before) * 1000 / megabytes}
}

// compressedLists lists with gzip, as client-go and kubectl do. Some rows list unchanged pods; the others change one
// pod in a hundred before every three lists. Megabytes are uncompressed.
func (s *server) compressedLists() map[string]float64 {
	out := map[string]float64{}
	const (
		asJSON     = "application/json"
		asProtobuf = "application/vnd.kubernetes.protobuf"
		asTable    = "application/json;as=Table;v=v1;g=meta.k8s.io" // kubectl's media type
	)
	some := max(1, *pods/100)
	for _, row := range []struct {
		name, accept   string
		limit, changed int
	}{
		{"LIST pods, JSON, gzip, as they were", asJSON, 0, 0},
		{"LIST pods, JSON, gzip, 1 % changed between three", asJSON, 0, some},
		{"LIST pods, protobuf, gzip, 1 % changed between three", asProtobuf, 0, some},
		{"LIST pods, Table, gzip, 1 % changed between three", asTable, 0, some},
		{"LIST pages of 500, JSON, gzip, 1 % changed between three", asJSON, 500, some},
	} {
		size := 0
		for range replicasWarm {
			size = s.list(s.gzipClient, row.accept, row.limit)
		}
		seconds, megabytes := 0.0, 0.0
		for round := range 10 {
			for i := range row.changed {
				note := fmt.Sprintf(`{"metadata":{"annotations":{"round":"%d"}}}`, serial.Add(1))
				pod := fmt.Sprintf("/api/v1/namespaces/bench/pods/p%d", (i*100+round)%*pods)
				s.do("PATCH", pod, "", []byte(note), 200)
			}
			before := s.cpu()
			for range 3 {
				if row.limit > 0 {
					s.list(s.gzipClient, row.accept, row.limit)
					// the client reads longer than the server works, and the server is idle meanwhile
				} else if !s.packed(context.Background(), "/api/v1/namespaces/bench/pods", row.accept) {
					log.Fatalf("%s: %s: the response is not gzip", s.name, row.name)
				}
				megabytes += float64(size) / 1e6
			}
			seconds += s.cpu() - before
		}
		out[row.name+" (CPU ms/MB)"] = seconds * 1000 / megabytes
	}
	return out
}

// packed requests a response with gzip and discards the body. It returns true if the response is compressed.
func (s *server) packed(ctx context.Context, path, accept string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	check(err)
	req.Header.Set("Accept", accept)
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := s.client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK && resp.Header.Get("Content-Encoding") == "gzip"
}

func (s *server) list(client *http.Client, accept string, limit int) (n int) {
	next := ""
	for {
		path := "/api/v1/namespaces/bench/pods"
		if limit > 0 {
			path += fmt.Sprintf("?limit=%d&continue=%s", limit, next)
		}
		body := s.doBy(client, "GET", path, accept, nil, 200)
		n += len(body)
		if limit == 0 {
			return n
		}
		var head struct{ Metadata struct{ Continue string } }
		check(json.Unmarshal(body, &head))
		if next = head.Metadata.Continue; next == "" {
			return n
		}
	}
}

// each makes n calls, 16 in flight, and returns CPU milliseconds per call.
func (s *server) each(row string, n int, f func(i int)) map[string]float64 {
	before := s.cpu()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	wg.Wait()
	return map[string]float64{row: (s.cpu() - before) * 1000 / float64(n)}
}

var serial atomic.Int64

func updateLeases(s *server) map[string]float64 {
	const path = "/apis/coordination.k8s.io/v1/namespaces/bench/leases"
	type held struct {
		sync.Mutex
		version string
	}
	leases := make([]held, 16)
	version := func(body []byte) string {
		var o struct {
			Metadata struct{ ResourceVersion string }
		}
		check(json.Unmarshal(body, &o))
		return o.Metadata.ResourceVersion
	}
	for i := range leases {
		leases[i].version = version(s.do("GET", fmt.Sprintf("%s/l%d", path, i), "", nil, 200))
	}
	return s.each("update a Lease (CPU ms)", 2000, func(i int) {
		l := &leases[i%16]
		l.Lock()
		defer l.Unlock()
		l.version = version(s.do("PUT", fmt.Sprintf("%s/l%d", path, i%16), "", []byte(fmt.Sprintf(
			`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"l%d","resourceVersion":%q},"spec":{"holderIdentity":"h","leaseDurationSeconds":40,"renewTime":"2026-01-01T00:00:00.%06dZ"}}`,
			i%16, l.version, serial.Add(1)%1000000)), 200))
	})
}

func createConfigMaps(s *server) map[string]float64 {
	return s.each("create a ConfigMap of 512 B (CPU ms)", 1000, func(int) {
		s.do("POST", "/api/v1/namespaces/bench/configmaps", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":%q}}`,
				serial.Add(1), strings.Repeat("x", 512))), 201)
	})
}

func createPods(s *server) map[string]float64 {
	return s.each("create a pod of 7.6 KB (CPU ms)", 500, func(int) {
		s.do("POST", "/api/v1/namespaces/more/pods", "", pod(fmt.Sprintf("m%d", serial.Add(1))), 201)
	})
}

func smallList(s *server) map[string]float64 {
	var all []time.Duration
	for range 100 {
		at := time.Now()
		s.do("GET", "/api/v1/namespaces/small/configmaps", "", nil, 200)
		all = append(all, time.Since(at))
	}
	slices.Sort(all)
	return map[string]float64{"a consistent LIST of one small object, idle: p50 (ms)": ms(all[50])}
}

func prepare(s *server) {
	for _, ns := range []string{"bench", "more", "events", "small"} {
		s.do("POST", "/api/v1/namespaces", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, ns)), 201)
		s.do("POST", "/api/v1/namespaces/"+ns+"/serviceaccounts", "",
			[]byte(`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"default"}}`), 201)
	}
	s.do("POST", "/api/v1/namespaces/small/configmaps", "",
		[]byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"one"}}`), 201)
	for i := range 16 {
		s.do("POST", "/apis/coordination.k8s.io/v1/namespaces/bench/leases", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"l%d"}}`, i)),
			201)
	}
	time.Sleep(time.Second) // admission's informers receive the service accounts
	s.each("", *pods, func(i int) {
		s.do("POST", "/api/v1/namespaces/bench/pods", "", pod(fmt.Sprintf("p%d", i)), 201)
	})
}

// pod returns a pod of about 7.6 KB as JSON. Most of it is the container spec.
func pod(name string) []byte {
	var env []string
	for i := range 40 {
		env = append(env, fmt.Sprintf(`{"name":"VARIABLE_%d","value":"a value of some length for variable %d"}`, i, i))
	}
	return []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":"bench","tier":"web"},"annotations":{"note":%q}},
"spec":{"containers":[{"name":"c","image":"registry.example/app:1.2.3","env":[%s],"resources":{"requests":{"cpu":"10m","memory":"16Mi"}}}]}}`, name, strings.Repeat("n", 800), strings.Join(env, ",")))
}

func (s *server) do(method, path, accept string, body []byte, want int) []byte {
	return s.doBy(s.client, method, path, accept, body, want)
}

func (s *server) doBy(client *http.Client, method, path, accept string, body []byte, want int) []byte {
	for try := 0; ; try++ {
		req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
		check(err)
		if accept != "" {
			req.Header.Set("Accept", accept)
		}
		req.Header.Set("Content-Type", "application/json")
		if method == http.MethodPatch {
			req.Header.Set("Content-Type", "application/merge-patch+json")
		}
		req.Header.Set("User-Agent", "bench")
		resp, err := client.Do(req)
		check(err)
		data, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		check(err)
		if resp.StatusCode == want {
			return data
		}
		if try > 20 || resp.StatusCode != http.StatusForbidden && resp.StatusCode != http.StatusTooManyRequests {
			log.Fatalf("%s %s %s: %s: %.300s", s.name, method, path, resp.Status, data)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// status sends a request and returns the status code.
func (s *server) status(method, path string) int {
	req, err := http.NewRequest(method, s.url+path, nil)
	check(err)
	resp, err := s.client.Do(req)
	check(err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	check(err)
	return resp.StatusCode
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
