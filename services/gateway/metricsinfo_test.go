package gateway

import (
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/telemetry/telemetrytest"
)

// Metrics label a request by its resource only if the resource is served. No label value is the client's choice.
func TestMetricLabelsAreServedResources(t *testing.T) {
	g := newTestGateway(t, &fakeServices{})
	eventually(t, func() bool { return g.discovery.View() != nil })
	served := &request.RequestInfo{IsResourceRequest: true, APIVersion: "v1", Resource: "namespaces"}
	if g.metricsInfo(served) != served {
		t.Errorf("a served resource is labelled by %+v", g.metricsInfo(served))
	}
	for _, info := range []*request.RequestInfo{
		nil,
		{Path: "/x", Verb: "get"},
		{IsResourceRequest: true, APIGroup: "x", APIVersion: "x", Resource: "x", Subresource: "x", Path: "/apis/x"},
		{IsResourceRequest: true, APIVersion: "v1", Resource: "namespaces", Subresource: "x", Path: "/x"},
		{IsResourceRequest: true, APIVersion: "v1", Resource: "x", Path: "/x"},
	} {
		l := g.metricsInfo(info)
		if strings.Contains(l.APIGroup+l.APIVersion+l.Resource+l.Subresource+l.Path, "x") {
			t.Errorf("%+v is labelled by %+v", info, l)
		}
	}
}

// Aborted requests of anonymous clients leave no labels in metrics. The log contains no error and none of their paths.
func TestAbortedRequestsAddNoLabels(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	var out telemetrytest.Buffer
	stop, err := new(telemetry.Options).Start(t.Context(), "gateway", &out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	g := newTestGateway(t, &fakeServices{})
	eventually(t, func() bool { return g.discovery.View() != nil })
	s := httptest.NewServer(g.handler)
	defer s.Close()
	const marker = "strangers-choice"
	for i, path := range []string{"/%s", "/apis/%s/v1/x", "/api/v1/%s", "/api/v1/namespaces/x/%s",
		"/api/v1/namespaces/x/pods/y/%s"} {
		for n := range 20 {
			conn, err := net.Dial("tcp", s.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.(*net.TCPConn).SetReadBuffer(4096)
			path := fmt.Sprintf(path, fmt.Sprintf("%s-%d-%d-%s", marker, i, n, strings.Repeat("a", 900_000)))
			fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
			if _, err := io.ReadFull(conn, make([]byte, 64)); err != nil {
				t.Fatal(err)
			}
			conn.Close()
		}
	}
	s.Close() // waits for the requests
	for _, from := range []prometheus.Gatherer{legacyregistry.DefaultGatherer, prometheus.DefaultGatherer} {
		families, err := from.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if strings.Contains(f.String(), marker) {
				t.Errorf("%s has a label that a client chose", f.GetName())
			}
		}
	}
	for line := range strings.Lines(out.String()) { // other parts of the process may log other lines
		if strings.Contains(line, marker) || strings.Contains(line, "level=ERROR") {
			t.Errorf("a line of %d bytes: %.300s", len(line), line)
		}
	}
}

func eventually(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it takes too long")
		}
	}
}
