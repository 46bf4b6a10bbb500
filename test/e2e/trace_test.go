package e2e

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// collector is an OpenTelemetry collector that stores the spans of each trace.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	mu     sync.Mutex
	traces map[string]map[string]bool // trace → "service: span"
	// names and parents map a span's ID to its name and to its parent's ID.
	names, parents map[string]string
}

// below returns true if a span of a trace is a descendant of another. The caller holds the lock.
func (c *collector) below(name, above string) bool {
	for id, n := range c.names {
		if n != name {
			continue
		}
		for up := c.parents[id]; up != ""; up = c.parents[up] {
			if c.names[up] == above {
				return true
			}
		}
	}
	return false
}

// Export implements TraceServiceServer.
func (c *collector) Export(_ context.Context,
	r *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range r.ResourceSpans {
		service := ""
		for _, a := range rs.Resource.GetAttributes() {
			if a.Key == "service.name" {
				service = a.Value.GetStringValue()
			}
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				id := hex.EncodeToString(s.TraceId)
				if c.traces[id] == nil {
					c.traces[id] = map[string]bool{}
				}
				c.traces[id][service+": "+s.Name] = true
				span := hex.EncodeToString(s.SpanId)
				c.names[span], c.parents[span] = service+": "+s.Name, hex.EncodeToString(s.ParentSpanId)
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

// collect runs a collector until the test ends, and returns its endpoint.
func collect(t *testing.T) (c *collector, endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c = &collector{traces: map[string]map[string]bool{}, names: map[string]string{}, parents: map[string]string{}}
	srv := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(srv, c)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	return c, l.Addr().String()
}

// TestAnEventIsTracedFromEtcdToItsWatchers checks that one trace covers an event from etcd to the log, to a replica and
// to the clients, through three processes.
func TestAnEventIsTracedFromEtcdToItsWatchers(t *testing.T) {
	t.Parallel()
	c, endpoint := collect(t)
	s := harness.Split(t, "", "--tracing-endpoint="+endpoint, "--tracing-sampling-ratio=1")
	maps := s.Client().CoreV1().ConfigMaps("default")
	w, err := maps.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	n := 0
	harness.Eventually(t, harness.Soon, func() error {
		n++
		if _, err := maps.Create(t.Context(),
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("traced", n)}},
			metav1.CreateOptions{}); err != nil {
			return err
		}
		time.Sleep(500 * time.Millisecond) // spans are exported in batches
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, spans := range c.traces {
			if spans["registry: publish configmaps"] && spans["watchfanout: apply"] && spans["gateway: deliver"] {
				return nil
			}
		}
		return fmt.Errorf("%d traces, none with publish, apply and deliver", len(c.traces))
	})
}

// TestARequestIsOneTrace checks that an administrator's traced request is one trace through every process, to etcd, and
// with its event to the watchers. Other users' traceparent headers are ignored, and untraced requests produce no trace.
func TestARequestIsOneTrace(t *testing.T) {
	t.Parallel()
	c, endpoint := collect(t)
	s := harness.Split(t, "", "--tracing-endpoint="+endpoint)
	s.Kubectl("create", "serviceaccount", "someone")
	token := strings.TrimSpace(s.Kubectl("create", "token", "someone"))
	ask := func(token, trace, method, path, body string) *http.Response {
		t.Helper()
		conf := s.Config()
		if token != "" {
			conf = rest.AnonymousClientConfig(conf)
			conf.BearerToken = token
		}
		client, err := harness.HTTPClient(conf)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), method, conf.Host+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if trace != "" {
			req.Header.Set("traceparent", "00-"+trace+"-00f067aa0ba902b7-01")
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode >= 300 {
			t.Fatalf("%s %s: %s", method, path, resp.Status)
		}
		return resp
	}
	w, err := s.Client().CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	const maps = "/api/v1/namespaces/default/configmaps"
	body := func(name string) string { return `{"metadata":{"name":"` + name + `"}}` }
	const write, list, none = "4bf92f3577b34da6a3ce929d0e0e4736", "4bf92f3577b34da6a3ce929d0e0e4737", "unsampled"
	if got := ask("", write, "POST", maps, body("traced")).Header.Get("Traceresponse"); !strings.HasPrefix(
		got,
		"00-"+write,
	) {
		t.Errorf("the response says %q", got)
	}
	ask("", list, "GET", maps, "")
	ask(token, "4bf92f3577b34da6a3ce929d0e0e4738", "GET", "/api", "")
	if got := ask("", "", "POST", maps, body(none)).Header.Get("Traceresponse"); got != "" {
		t.Errorf("the response to an untraced request says %q", got)
	}
	tries := 0
	harness.Eventually(t, harness.Soon, func() error {
		if tries++; tries%40 == 0 { // the publisher received the trace context after the event, and traced nothing
			ask("", write, "POST", maps, body(fmt.Sprint("traced-", tries)))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for trace, spans := range map[string][]string{
			write: {
				"gateway: POST /api/v1/namespaces/{:namespace}/configmaps",
				"gateway: watershed.registry.v1.Objects/WriteUnary",
				"registry: watershed.registry.v1.Objects/WriteUnary",
				"gateway: authorization",
				"registry: Create",
				"registry: Create etcd3",
				"registry: SerializeObject",
				"registry: etcdserverpb.KV/Txn",
				"registry: publish configmaps",
				"registry: log",
				"watchfanout: apply",
				"watchfanout: send",
				"gateway: deliver",
			},
			list: {
				"gateway: GET /api/v1/namespaces/{:namespace}/configmaps",
				"watchfanout: watershed.watchfanout.v1.Watch/List",
			},
		} {
			for _, name := range spans {
				if !c.traces[trace][name] {
					return fmt.Errorf("trace %s has %v, not %s", trace, c.traces[trace], name)
				}
			}
		}
		for name, above := range map[string]string{
			"authz: watershed.authz.v1.Authz/Authorize": "gateway: authorization",
			"gateway: watershed.registry.v1.Objects/WriteUnary": "gateway: POST " +
				"/api/v1/namespaces/{:namespace}/configmaps",
			"registry: Create":             "gateway: watershed.registry.v1.Objects/WriteUnary",
			"registry: publish configmaps": "registry: Create etcd3",
			"gateway: deliver":             "registry: publish configmaps",
			"registry: SerializeObject":    "registry: Create",
		} {
			if !c.below(name, above) {
				return fmt.Errorf("%s is not below %s", name, above)
			}
		}
		return nil
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.below("gateway: watershed.registry.v1.Objects/WriteUnary", "gateway: authorization") {
		t.Error("the request goes on within a filter's span")
	}
	if len(c.traces) != 2 {
		t.Errorf("%d traces: %v", len(c.traces), c.traces)
	}
}
