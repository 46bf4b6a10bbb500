package e2e

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// collector is an OpenTelemetry collector that remembers the spans of each trace.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	mu     sync.Mutex
	traces map[string]map[string]string // trace → span → service
}

// Export implements the collector's service.
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
					c.traces[id] = map[string]string{}
				}
				c.traces[id][s.Name] = service
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

// One trace tells an event's way, through three processes: from etcd into the log, into a replica, to the clients.
func TestAnEventIsTracedFromEtcdToItsWatchers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{traces: map[string]map[string]string{}}
	srv := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(srv, c)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	s := harness.Split(t, "", "--tracing-endpoint="+l.Addr().String())
	maps := s.Client().CoreV1().ConfigMaps("default")
	w, err := maps.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	n := 0
	harness.Eventually(t, 30*time.Second, func() error {
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
			if spans["publish configmaps"] == "registry" && spans["apply"] == "watchfanout" &&
				spans["deliver"] == "gateway" {
				return nil
			}
		}
		return fmt.Errorf("%d traces, none with publish, apply and deliver", len(c.traces))
	})
}
