package e2e

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/rpc"
	"watershed.dev/test/harness"
)

// distinct is the number of values of each part of a request. The bounds hold for 2,000, which take two minutes.
var distinct = flag.Int("distinct", 500, "the number of values of each part of a request")

const (
	// maxHeapGrowth and maxSeriesGrowth bound the growth of a process.
	maxHeapGrowth   = 10 << 20
	maxSeriesGrowth = 200
)

// footprint is the size of a process after a garbage collection. heap is the size of live objects.
type footprint struct {
	heap   int
	series map[string]bool
}

var liveHeap = regexp.MustCompile(`# HeapAlloc = (\d+)`)

// footprintOf reads the size of a process of a split.
func footprintOf(t *testing.T, s *harness.Server, process string) (f footprint) {
	t.Helper()
	client := s.Debug(process)
	page := func(path string) string {
		resp, err := client.Get("http://" + process + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for range 2 { // the first collection runs finalizers
		m := liveHeap.FindStringSubmatch(page("/debug/pprof/heap?gc=1&debug=1"))
		if m == nil {
			t.Fatalf("%s has no heap profile", process)
		}
		f.heap, _ = strconv.Atoi(m[1])
	}
	f.series = map[string]bool{}
	for line := range strings.Lines(page("/metrics")) {
		if !strings.HasPrefix(line, "#") {
			f.series[line[:strings.LastIndex(line, " ")]] = true
		}
	}
	return f
}

// grown returns an error if a process is larger than at before. known has the series that its service had before: a
// registry that becomes the leader adds the series of a leader.
func (f footprint) grown(before footprint, known map[string]bool) error {
	if n := f.heap - before.heap; n > maxHeapGrowth {
		return fmt.Errorf("the heap has grown by %d KB", n>>10)
	}
	var added []string
	for name := range f.series {
		if !known[name] {
			added = append(added, name)
		}
	}
	if len(added) > maxSeriesGrowth {
		return fmt.Errorf("metrics have %d more series, such as %.2000q", len(added), added[:20])
	}
	return nil
}

// flood sends n requests of each kind to the gateways, over HTTP/1.1 and HTTP/2.
func flood(t *testing.T, s *harness.Server, n int) {
	t.Helper()
	config := s.Config()
	certificates, err := rest.TLSConfigFor(config)
	if err != nil {
		t.Fatal(err)
	}
	host := strings.TrimPrefix(config.Host, "https://")
	for _, http2 := range []bool{false, true} {
		protocols := new(http.Protocols)
		protocols.SetHTTP1(!http2)
		protocols.SetHTTP2(http2)
		transport := &http.Transport{
			TLSClientConfig:     certificates.Clone(),
			Protocols:           protocols,
			MaxIdleConnsPerHost: 16,
			DisableCompression:  true,
		}
		client := &http.Client{Transport: transport, Timeout: time.Minute}
		parallel(n, func(i int) {
			for _, req := range requestsOf(t, "https://"+host, fmt.Sprintf("%d%v", i, http2)) {
				resp, err := client.Do(req)
				if err != nil { // the server may close the connection of an invalid request
					continue
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		transport.CloseIdleConnections()
	}
	parallel(n, func(i int) { malformed(t, host, i) })
}

// parallel calls do with 0 to n-1, from 16 goroutines.
func parallel(n int, do func(i int)) {
	const workers = 16
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for i := worker; i < n; i += workers {
				do(i)
			}
		})
	}
	wg.Wait()
}

// requestsOf returns a request for each part of a request, with the value v in that part.
func requestsOf(t *testing.T, host, v string) (all []*http.Request) {
	add := func(method, path, body string, headers ...string) {
		req, err := http.NewRequestWithContext(t.Context(), method, host+path, strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		all = append(all, req)
	}
	const maps = "/api/v1/namespaces/default/configmaps"
	for _, path := range []string{"/" + v, "/api/v1/" + v, "/api/v1/namespaces/" + v + "/pods", maps + "/" + v,
		"/apis/g" + v + ".example.com/v1/things", "/apis/apps/" + v, "/apis/apps/v1/deployments/" + v + "/" + v,
		"/openapi/v3/" + v, "/debug/" + v, "/healthz/" + v, maps + "?" + v + "=" + v, maps + "?labelSelector=a=" + v,
		maps + "?fieldSelector=" + v, maps + "?resourceVersion=" + v, maps + "?limit=1&continue=" + v} {
		add("GET", path, "")
	}
	for _, header := range []string{"X-" + v, "Accept-Encoding", "Impersonate-User", "Authorization", "Traceparent",
		"If-None-Match", "X-Remote-User", "Audit-Id", "Content-Encoding", "Origin", "X-Forwarded-For"} {
		add("GET", maps, "", header, "Bearer "+v)
	}
	add("GET", maps, "", "User-Agent", v)
	add("POST", maps, `{"metadata":{"name":"x"},"kind":"`+v+`"}`, "User-Agent", v, "Content-Type", "application/json")
	add("M"+v, maps, "")
	add("M"+v, "/"+v, "")
	for _, mediaType := range []string{"application/" + v, "application/json;as=" + v + ";g=meta.k8s.io;v=v1",
		"application/json;" + v + "=" + v, "text/" + v + ";q=0.3,*/*;q=0.1"} {
		add("GET", maps, "", "Accept", mediaType)
		add("POST", maps, "x", "Content-Type", mediaType)
		add("PATCH", maps+"/x", "x", "Content-Type", mediaType)
	}
	return all
}

// malformed sends the invalid request i over a connection of its own, in HTTP/1.1 or in frames of HTTP/2.
func malformed(t *testing.T, host string, i int) {
	t.Helper()
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	text := []string{
		"GET /%d HTTP/9.9\r\n\r\n",
		"%d\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nBad Header %d: x\r\n\r\n",
		"GET /%%%d HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x%d\r\n\r\n",
		preface + "\x00\x00\x04\x01\x05\x00\x00\x00\x01%d",
		preface + "\x00\x00\x08\xff\x00\x00\x00\x00\x01%08d",
		preface + "\xff\xff\xff\x00%d",
	}[i%8]
	protocol := "http/1.1"
	if strings.HasPrefix(text, preface) {
		protocol = "h2"
	}
	c, err := tls.Dial("tcp", host, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}})
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond)) // the server may wait for the rest of a frame
	_, _ = fmt.Fprintf(c, text, i)
	_, _ = io.Copy(io.Discard, c)
}

// verbatim is a codec that sends bytes as they are, under a name of the test's own.
type verbatim struct{ name string }

func (verbatim) Marshal(v any) ([]byte, error)   { return v.([]byte), nil }
func (verbatim) Unmarshal(_ []byte, _ any) error { return nil }
func (c verbatim) Name() string                  { return c.name }

// floodRPC calls a service n times for each kind of call, with a valid identity.
func floodRPC(t *testing.T, s *harness.Server, process, client string, methods []string, n int) {
	t.Helper()
	service, _, _ := strings.Cut(process, "-")
	pki := func(name string) string { return filepath.Join(s.Dir, "pki", "inner-"+name) }
	conn, err := rpc.Dial(rpc.TLS{CertFile: pki(client) + ".crt", KeyFile: pki(client) + ".key", CAFile: pki("ca.crt")},
		service, rpc.Addresses{"unix:" + filepath.Join(s.Dir, process+".rpc")})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ready, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ready, state) {
			t.Fatalf("the connection to %s is %s", process, state)
		}
	}
	var unknown atomic.Int32
	call := func(timeout time.Duration, method, codec, body string, pairs ...string) {
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), pairs...), timeout)
		defer cancel()
		err := conn.Invoke(ctx, method, []byte(body), new([]byte), grpc.ForceCodec(verbatim{codec}))
		if status.Code(err) == codes.Unimplemented {
			unknown.Add(1)
		}
	}
	const atOnce, mayHang = 5 * time.Second, 50 * time.Millisecond // timeouts of unknown and of known methods
	known := methods[0]
	parallel(n, func(i int) {
		v := fmt.Sprint(i)
		call(atOnce, "/"+v+"/"+v, "proto", "")
		call(atOnce, known[:strings.LastIndex(known, "/")]+"/M"+v, "proto", "")
		call(atOnce, v, "proto", "")
		call(mayHang, known, "c"+v, "")
		call(atOnce, "/x/y", "proto", "", "k"+v, v, "traceparent", v, "grpc-timeout-"+v, v)
		call(mayHang, methods[i%len(methods)], "proto", "\xff"+v)
	})
	if got := int(unknown.Load()); got < 3*n {
		t.Errorf("%s rejected %d calls of unknown methods, want %d", process, got, 4*n)
	}
}

// TestDistinctRequestsLeaveNothingBehind sends requests with hundreds of distinct paths, headers, user agents, methods
// and media types to the gateways and directly to each service. Then every process has the heap and the metrics that it
// had before.
func TestDistinctRequestsLeaveNothingBehind(t *testing.T) {
	s := harness.Split(t, "")
	processes := []string{"gateway-0", "gateway-1", "authn-0", "authz-0", "admission-0", "registry-0", "registry-1",
		"watchfanout-0", "watchfanout-1"}
	methods := map[string][]string{}
	for method, clients := range rpc.AllowedClients {
		if clients[0] == "gateway" && strings.HasPrefix(method, "/watershed.") {
			service := strings.Split(method, ".")[1]
			methods[service] = append(methods[service], method)
		}
	}
	for _, of := range methods {
		slices.Sort(of)
	}
	all := func(n int) {
		flood(t, s, n)
		for _, process := range processes[2:] {
			service, _, _ := strings.Cut(process, "-")
			floodRPC(t, s, process, "gateway", methods[service], n)
		}
	}
	all(50) // fills pools and creates the usual metrics
	before := map[string]footprint{}
	known := map[string]map[string]bool{} // by service
	for _, process := range processes {
		before[process] = footprintOf(t, s, process)
		service, _, _ := strings.Cut(process, "-")
		if known[service] == nil {
			known[service] = map[string]bool{}
		}
		maps.Copy(known[service], before[process].series)
	}
	began := time.Now()
	all(*distinct)
	t.Logf("%d values of each part of a request in %s", *distinct, time.Since(began).Round(time.Second))
	for _, process := range processes {
		service, _, _ := strings.Cut(process, "-")
		harness.Eventually(t, 2*time.Minute, func() error { // caches expire
			if err := footprintOf(t, s, process).grown(before[process], known[service]); err != nil {
				return fmt.Errorf("%s: %w", process, err)
			}
			return nil
		})
		after := footprintOf(t, s, process)
		t.Logf("%s: heap %+d KB, %d series, %d before", process, (after.heap-before[process].heap)>>10,
			len(after.series), len(before[process].series))
	}
}
