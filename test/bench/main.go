// Command bench measures Watershed beside kube-apiserver: each with a fresh etcd of the same settings, taking turns at
// the same work. CPU is the servers' user and system time from the operating system, never the client's or etcd's; for
// Watershed it is the sum over all its processes and NATS. It prints a table, and writes it into docs/performance.md.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"
)

var (
	bin       = flag.String("bin", ".build/bin", "Where kube-apiserver and etcd are.")
	watershed = flag.String("watershed", "bin/watershed", "The binary under test.")
	pods      = flag.Int("pods", 10000, "How many pods the lists hold.")
	rounds    = flag.Int("rounds", 3, "How often each piece of work is done; the table has the medians.")
	watchers  = flag.Int("watchers", 1000, "How many watchers events are delivered to.")
	out       = flag.String("out", "../docs/performance.md", "The page whose table is replaced.")
	only      = flag.String("only", "", "Servers to measure, comma separated; all by default.")
)

// server is one thing that is measured.
type server struct {
	name   string
	url    string
	client *http.Client
	pids   func() []int
	stop   func()
}

func main() {
	log.SetFlags(0)
	flag.Parse()
	dir, err := os.MkdirTemp("", "wsbench")
	check(err)
	defer os.RemoveAll(dir)
	var servers []*server
	for name, start := range map[string]func(string) *server{"kube-apiserver": startReference, "up": startUp, "split": startSplit} {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), name) {
			continue
		}
		d := filepath.Join(dir, name)
		check(os.MkdirAll(d, 0o700))
		s := start(d)
		defer s.stop()
		servers = append(servers, s)
	}
	slices.SortFunc(servers, func(a, b *server) int { return strings.Compare(order(a.name), order(b.name)) })
	results := map[string]map[string][]float64{}
	record := func(row string, s *server, v float64) {
		if results[row] == nil {
			results[row] = map[string][]float64{}
		}
		results[row][s.name] = append(results[row][s.name], v)
		log.Printf("%-60s %-15s %10.3f", row, s.name, v)
	}
	for _, s := range servers {
		record(rowIdle, s, s.rss())
		prepare(s)
	}
	for range *rounds {
		for _, s := range servers {
			for _, w := range work {
				for row, v := range w(s) {
					record(row, s, v)
				}
			}
		}
	}
	for _, s := range servers {
		record(rowServed, s, s.rss())
	}
	table := render(results, servers)
	fmt.Println(table)
	check(write(table))
}

func order(name string) string {
	return map[string]string{"kube-apiserver": "1", "up": "2", "split": "3"}[name]
}

const (
	rowIdle   = "resident memory when idle (MB)"
	rowServed = "resident memory with the pods served (MB)"
)

// work is done in turns.
var work = []func(*server) map[string]float64{
	func(s *server) map[string]float64 {
		return s.lists("LIST pods, JSON (CPU ms/MB)", "application/json", 0)
	},
	func(s *server) map[string]float64 {
		return s.lists("LIST pods, protobuf (CPU ms/MB)", "application/vnd.kubernetes.protobuf", 0)
	},
	func(s *server) map[string]float64 {
		return s.lists("LIST pods, Table (CPU ms/MB)", "application/json;as=Table;v=v1;g=meta.k8s.io", 0)
	},
	func(s *server) map[string]float64 {
		return s.lists("LIST pages of 500, JSON (CPU ms/MB)", "application/json", 500)
	},
	func(s *server) map[string]float64 {
		return s.each("GET a pod, JSON (CPU ms)", 2000, func(i int) { s.do("GET", fmt.Sprintf("/api/v1/namespaces/bench/pods/p%d", i%*pods), "", nil, 200) })
	},
	updateLeases, createConfigMaps, createPods, deliver, smallList,
}

func (s *server) lists(row, accept string, limit int) map[string]float64 {
	s.list(accept, limit) // warm
	before, megabytes := s.cpu(), 0.0
	for range 5 {
		megabytes += float64(s.list(accept, limit)) / 1e6
	}
	return map[string]float64{row: (s.cpu() - before) * 1000 / megabytes}
}

func (s *server) list(accept string, limit int) (n int) {
	next := ""
	for {
		path := "/api/v1/namespaces/bench/pods"
		if limit > 0 {
			path += fmt.Sprintf("?limit=%d&continue=%s", limit, next)
		}
		body := s.do("GET", path, accept, nil, 200)
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

// each does n calls, 16 in flight, and answers CPU milliseconds a call.
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
		s.do("POST", "/api/v1/namespaces/bench/configmaps", "", []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":%q}}`, serial.Add(1), strings.Repeat("x", 512))), 201)
	})
}

func createPods(s *server) map[string]float64 {
	return s.each("create a pod of 7.6 KB (CPU ms)", 500, func(int) {
		s.do("POST", "/api/v1/namespaces/more/pods", "", pod(fmt.Sprintf("m%d", serial.Add(1))), 201)
	})
}

// deliver measures events to many watchers: CPU a delivery, and how old an event is when its watcher has it.
func deliver(s *server) map[string]float64 {
	ctx, cancel := context.WithCancel(context.Background())
	var head struct {
		Metadata struct{ ResourceVersion string }
	}
	check(json.Unmarshal(s.do("GET", "/api/v1/namespaces/small/configmaps", "", nil, 200), &head))
	var ready, wg sync.WaitGroup
	var mu sync.Mutex
	var ages []time.Duration
	var delivered atomic.Int64
	conns := make([]*http.Client, 20)
	for i := range conns {
		conns[i] = &http.Client{Transport: s.client.Transport.(*http.Transport).Clone()}
	}
	for i := range *watchers {
		ready.Add(1)
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, "GET", s.url+"/api/v1/namespaces/events/configmaps?watch=true&resourceVersion="+head.Metadata.ResourceVersion, nil)
			check(err)
			resp, err := conns[i%len(conns)].Do(req)
			check(err)
			defer resp.Body.Close()
			ready.Done()
			var mine []time.Duration
			lines := bufio.NewReaderSize(resp.Body, 8<<10)
			for {
				line, err := lines.ReadBytes('\n')
				if err != nil {
					break
				}
				if k := bytes.Index(line, []byte(`"sent":"`)); k >= 0 {
					sent, _ := strconv.ParseInt(string(line[k+8:k+8+19]), 10, 64)
					mine = append(mine, time.Since(time.Unix(0, sent)))
					delivered.Add(1)
				}
			}
			mu.Lock()
			ages = append(ages, mine...)
			mu.Unlock()
		})
	}
	ready.Wait()
	const updates = 200
	before := s.cpu()
	tick := time.NewTicker(25 * time.Millisecond)
	var writes []time.Duration
	for i := range updates {
		<-tick.C
		at := time.Now()
		s.do("POST", "/api/v1/namespaces/events/configmaps", "", []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"e%d-%d"},"data":{"sent":"%019d","pad":%q}}`, serial.Add(1), i, at.UnixNano(), strings.Repeat("x", 900))), 201)
		writes = append(writes, time.Since(at))
	}
	tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); delivered.Load() < int64(updates**watchers) && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	used, n := s.cpu()-before, delivered.Load()
	cancel()
	wg.Wait()
	slices.Sort(ages)
	slices.Sort(writes)
	if n < int64(updates**watchers) {
		log.Printf("%s: only %d of %d deliveries", s.name, n, updates**watchers)
	}
	name := fmt.Sprintf("deliver 1.3 KB to each of %d watchers, 40/s", *watchers)
	return map[string]float64{name + " (CPU µs a delivery)": used * 1e6 / float64(n), name + ": age p99 (ms)": ms(ages[len(ages)*99/100]), name + ": the writer's p50 (ms)": ms(writes[len(writes)/2])}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

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
		s.do("POST", "/api/v1/namespaces", "", []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, ns)), 201)
		s.do("POST", "/api/v1/namespaces/"+ns+"/serviceaccounts", "", []byte(`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"default"}}`), 201)
	}
	s.do("POST", "/api/v1/namespaces/small/configmaps", "", []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"one"}}`), 201)
	for i := range 16 {
		s.do("POST", "/apis/coordination.k8s.io/v1/namespaces/bench/leases", "", []byte(fmt.Sprintf(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"l%d"}}`, i)), 201)
	}
	time.Sleep(time.Second) // informers of admission see the service accounts
	s.each("", *pods, func(i int) { s.do("POST", "/api/v1/namespaces/bench/pods", "", pod(fmt.Sprintf("p%d", i)), 201) })
}

// pod is one of about 7.6 KB as JSON, most of it in what pods are made of.
func pod(name string) []byte {
	var env []string
	for i := range 40 {
		env = append(env, fmt.Sprintf(`{"name":"VARIABLE_%d","value":"a value of some length for variable %d"}`, i, i))
	}
	return []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":"bench","tier":"web"},"annotations":{"note":%q}},
"spec":{"containers":[{"name":"c","image":"registry.example/app:1.2.3","env":[%s],"resources":{"requests":{"cpu":"10m","memory":"16Mi"}}}]}}`, name, strings.Repeat("n", 800), strings.Join(env, ",")))
}

func (s *server) do(method, path, accept string, body []byte, want int) []byte {
	for try := 0; ; try++ {
		req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
		check(err)
		if accept != "" {
			req.Header.Set("Accept", accept)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("User-Agent", "bench")
		resp, err := s.client.Do(req)
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

// cpu is the seconds of processor time that the server's processes have used.
func (s *server) cpu() float64 {
	total := 0.0
	for _, pid := range s.pids() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
		user, _ := strconv.ParseFloat(f[11], 64)
		system, _ := strconv.ParseFloat(f[12], 64)
		total += (user + system) / 100
	}
	return total
}

// rss is their resident memory in megabytes.
func (s *server) rss() float64 {
	total := 0.0
	for _, pid := range s.pids() {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(b)); len(f) > 1 {
			pages, _ := strconv.ParseFloat(f[1], 64)
			total += pages * float64(os.Getpagesize()) / 1e6
		}
	}
	return total
}

func run(dir, name, program string, args ...string) (*exec.Cmd, string) {
	path := filepath.Join(dir, name+".out")
	f, err := os.Create(path)
	check(err)
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	check(cmd.Start())
	return cmd, path
}

func absolute(p string) string {
	a, err := filepath.Abs(p)
	check(err)
	return a
}

func startEtcd(dir string) (string, *exec.Cmd) {
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", freePort()), fmt.Sprintf("http://127.0.0.1:%d", freePort())
	cmd, _ := run(dir, "etcd", absolute(filepath.Join(*bin, "etcd")), "--name", "e", "--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "e="+peer, "--log-level", "error", "--quota-backend-bytes", "8589934592")
	return client, cmd
}

func startReference(dir string) *server {
	etcd, ecmd := startEtcd(dir)
	time.Sleep(time.Second)
	port := freePort()
	// The certificates are Watershed's kind, made by starting it once.
	pki := filepath.Join(dir, "pki")
	makePKI(dir)
	cmd, _ := run(dir, "kube-apiserver", absolute(filepath.Join(*bin, "kube-apiserver")), "--etcd-servers", etcd, "--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1", "--cert-dir", dir,
		"--tls-cert-file", pki+"/apiserver.crt", "--tls-private-key-file", pki+"/apiserver.key", "--client-ca-file", pki+"/ca.crt", "--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file", pki+"/sa.pub", "--service-account-signing-key-file", pki+"/sa.key", "--authorization-mode", "Node,RBAC", "--service-cluster-ip-range", "10.96.0.0/16", "--advertise-address", "192.0.2.1")
	s := &server{name: "kube-apiserver", url: fmt.Sprintf("https://127.0.0.1:%d", port), client: clientOf(filepath.Join(dir, "admin.kubeconfig")),
		pids: func() []int { return []int{cmd.Process.Pid} }, stop: func() { kill(cmd); kill(ecmd) }}
	s.ready()
	return s
}

func makePKI(dir string) {
	cmd, out := run(dir, "pki", absolute(*watershed), "up", "--data-dir", dir, "--secure-port", fmt.Sprint(freePort()), "--bind-address", "127.0.0.1")
	waitFor(out, "Ready after")
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
}

func startUp(dir string) *server {
	etcd, ecmd := startEtcd(dir)
	time.Sleep(time.Second)
	port := freePort()
	cmd, out := run(dir, "up", absolute(*watershed), "up", "--data-dir", filepath.Join(dir, "w"), "--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1", "--etcd-servers", etcd)
	waitFor(out, "Ready after")
	return &server{name: "up", url: fmt.Sprintf("https://127.0.0.1:%d", port), client: clientOf(filepath.Join(dir, "w", "admin.kubeconfig")),
		pids: func() []int { return []int{cmd.Process.Pid} }, stop: func() { kill(cmd); kill(ecmd) }}
}

func startSplit(dir string) *server {
	port := freePort()
	data := filepath.Join(dir, "w")
	cmd, out := run(dir, "split", absolute(*watershed), "split", "--data-dir", data, "--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1")
	waitFor(out, "Ready after")
	return &server{name: "split", url: fmt.Sprintf("https://127.0.0.1:%d", port), client: clientOf(filepath.Join(data, "admin.kubeconfig")), stop: func() { kill(cmd) },
		pids: func() (all []int) { // everything but etcd, NATS included
			files, _ := filepath.Glob(filepath.Join(data, "*.pid"))
			for _, f := range files {
				if strings.HasPrefix(filepath.Base(f), "etcd") {
					continue
				}
				b, _ := os.ReadFile(f)
				if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
					all = append(all, pid)
				}
			}
			return all
		}}
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
	}
}

func waitFor(path, text string) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(text)) {
			return
		}
	}
	b, _ := os.ReadFile(path)
	log.Fatalf("no %q in %s:\n%s", text, path, b)
}

func (s *server) ready() {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if resp, err := s.client.Get(s.url + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return
			}
		}
	}
	log.Fatalf("%s is not ready", s.name)
}

// clientOf is an HTTP/2 client with a kubeconfig's certificate.
func clientOf(kubeconfig string) *http.Client {
	b, err := os.ReadFile(kubeconfig)
	check(err)
	var c struct {
		Users []struct {
			User struct {
				Crt string `json:"client-certificate-data"`
				Key string `json:"client-key-data"`
			} `json:"user"`
		} `json:"users"`
	}
	check(yaml.Unmarshal(b, &c))
	crt, err := base64.StdEncoding.DecodeString(c.Users[0].User.Crt)
	check(err)
	key, err := base64.StdEncoding.DecodeString(c.Users[0].User.Key)
	check(err)
	pair, err := tls.X509KeyPair(crt, key)
	check(err)
	return &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, DisableCompression: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}}}
}

func freePort() int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func render(results map[string]map[string][]float64, servers []*server) string {
	var rows []string
	for r := range results {
		rows = append(rows, r)
	}
	slices.Sort(rows)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, %d pods, medians of %d rounds. kube-apiserver 1.36.3 with default flags; external etcd 3.6 for kube-apiserver and `up`.\n\n| work |", time.Now().UTC().Format("2006-01-02"), runtime.NumCPU(), runtime.Version(), *pods, *rounds)
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
func write(table string) error {
	page, err := os.ReadFile(*out)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(page), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", *out, begin, end)
	}
	return os.WriteFile(*out, []byte(head+begin+"\n"+table+end+tail), 0o644)
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
