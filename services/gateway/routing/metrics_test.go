package routing

import (
	"context"
	"crypto/tls"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/paths"
	"watershed.dev/services/gateway/h2writer"
)

// samples returns the counters or sums of a metric by their verb, scope, resource and code.
func samples(t *testing.T, name string) map[string]float64 {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			key := []string{labels["verb"], labels["scope"], labels["resource"], labels["code"]}
			if f.GetName() == name {
				all[strings.TrimSpace(strings.Join(key, " "))] = m.GetCounter().GetValue() + m.GetHistogram().GetSampleSum()
			}
		}
	}
	return all
}

// A request is counted with kube-apiserver's labels. The scope of a built-in resource is the path's, and the scope of a
// custom resource is the selector's. Requests that kube-apiserver rejects before its handlers are not counted.
func TestRequestsAreCountedAsInKubeAPIServer(t *testing.T) {
	metrics.Register()
	r := newTestRouter(t, &fakeBackends{})
	const pods, widgets = "/api/v1/namespaces/x/pods", "/apis/example.com/v1/namespaces/x/widgets"
	const named = "?fieldSelector=metadata.name%3Da"
	strategic := "application/strategic-merge-patch+json"
	for _, x := range []struct {
		method, path string
		headers      []string
		counted      string
	}{
		{"GET", pods + named, nil, "LIST namespace pods 200"},
		{"GET", "/api/v1/pods" + named, nil, "LIST cluster pods 200"},
		{"GET", pods + "/a", nil, "GET resource pods 200"},
		{"POST", pods, nil, "POST resource pods 201"},
		{"DELETE", pods + named, nil, "DELETE namespace pods 201"},
		{"GET", pods + named + "&watch=1&limit=x", nil, "WATCH namespace pods 400"},
		{"GET", widgets + named, nil, "GET resource widgets 200"},
		{"GET", widgets, []string{"Accept", "application/vnd.kubernetes.protobuf"}, "LIST namespace widgets 406"},
		{"PATCH", widgets + "/a", []string{"Content-Type", strategic}, "PATCH resource widgets 415"},
		{"GET", pods, []string{"Accept", "text/html"}, ""},
		{"HEAD", pods + "/a", nil, ""},
		{"PUT", pods, nil, ""},
		{"PATCH", pods + "/a", []string{"Content-Type", "text/plain"}, ""},
		{"PUT", pods + "/a/exec", nil, ""},
		{"OPTIONS", widgets, nil, ""},
	} {
		const name = "apiserver_request_total"
		before := samples(t, name)
		code, _ := doRequest(t, r, x.method, x.path, "body", x.headers...)
		after := samples(t, name)
		maps.DeleteFunc(after, func(key string, n float64) bool { return n == before[key] })
		if got := strings.Join(slices.Collect(maps.Keys(after)), ", "); got != x.counted {
			t.Errorf("%s %s: %d is counted as %q, not %q", x.method, x.path, code, got, x.counted)
		}
	}
}

// The size of a list that bypasses the HTTP/2 server is counted.
func TestTheSizeOfALongListIsCounted(t *testing.T) {
	metrics.Register()
	r := newTestRouter(t, &fakeBackends{tierListSize: hijackAbove + 1})
	s := httptest.NewUnstartedServer(nil)
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(s.Config, h2); err != nil {
		t.Fatal(err)
	}
	h := h2writer.Handler(genericapifilters.WithRequestInfo(r, paths.RequestInfo))
	s.Config.TLSNextProto[http2.NextProtoTLS] = func(srv *http.Server, conn *tls.Conn, _ http.Handler) {
		c := h2writer.NewConn(conn, time.Minute, 100)
		h2.ServeConn(c, &http2.ServeConnOpts{Context: c.WithConn(context.Background()), BaseConfig: srv, Handler: h})
	}
	s.EnableHTTP2, s.TLS = true, s.Config.TLSConfig
	s.StartTLS()
	defer s.Close()
	const name, list = "apiserver_response_sizes", "LIST cluster pods"
	before := samples(t, name)[list]
	resp, err := s.Client().Get(s.URL + "/api/v1/pods")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.ProtoMajor != 2 || len(data) == 0 {
		t.Fatalf("%s: %d bytes, %v", resp.Proto, len(data), err)
	}
	if got := samples(t, name)[list] - before; got != float64(len(data)) {
		t.Errorf("%v of %d bytes are counted", got, len(data))
	}
}
