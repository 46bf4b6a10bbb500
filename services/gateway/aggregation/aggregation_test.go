package aggregation

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// newAggregatedServer returns an aggregated API server that accepts every host name.
func newAggregatedServer(t *testing.T, h http.HandlerFunc) *registryv1.APIService {
	t.Helper()
	s := httptest.NewTLSServer(h)
	t.Cleanup(s.Close)
	return &registryv1.APIService{
		Group:                 "metrics.k8s.io",
		Version:               "v1",
		ServiceName:           "metrics",
		ServiceNamespace:      "kube-system",
		Addresses:             []string{strings.TrimPrefix(s.URL, "https://")},
		Available:             true,
		InsecureSkipTlsVerify: true,
	}
}

func proxyTo(t *testing.T, all ...*registryv1.APIService) *Proxy {
	t.Helper()
	p, err := New(&Config{RejectRedirects: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Set(discovery.NewView(&registryv1.DiscoveryResponse{ApiServices: all}))
	return p
}

func serve(p *Proxy, u user.Info, header http.Header) *httptest.ResponseRecorder {
	req := httptest.NewRequest("GET", "/apis/metrics.k8s.io/v1/nodes?limit=5", nil)
	for k, v := range header {
		req.Header[k] = v
	}
	ctx := req.Context()
	if u != nil {
		ctx = request.WithUser(ctx, u)
	}
	ctx = request.WithRequestInfo(ctx, &request.RequestInfo{})
	w := httptest.NewRecorder()
	p.Serve(w, req.WithContext(ctx), "metrics.k8s.io", "v1")
	return w
}

// signal is flow control's initialization signal, which releases a watch's seats.
type signal chan struct{}

func (s signal) Signal() { close(s) }
func (s signal) Wait()   { <-s }

// A watch's seats are released before the aggregated server responds.
func TestAWatchOfAnotherServerGivesItsSeatsBack(t *testing.T) {
	released := make(signal)
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-released:
		case <-time.After(2 * time.Minute):
			http.Error(w, "its seats are taken", http.StatusInternalServerError)
		}
	}))
	ctx := flowcontrol.WithInitializationSignal(t.Context(), released)
	ctx = request.WithUser(request.WithRequestInfo(ctx, &request.RequestInfo{}), &user.DefaultInfo{Name: "bob"})
	w := httptest.NewRecorder()
	p.Serve(w, httptest.NewRequestWithContext(ctx, "GET", "/apis/metrics.k8s.io/v1/nodes?watch=1", nil),
		"metrics.k8s.io", "v1")
	if w.Code != http.StatusOK {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// A request reaches the aggregated server with the headers of its user. Headers that the client set are removed.
func TestRequestCarriesItsUser(t *testing.T) {
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s as %s of %s, %s", r.Method, r.URL, r.Header.Get("X-Remote-User"),
			r.Header.Values("X-Remote-Group"), r.Header.Get("X-Remote-Extra-Scopes"))
	}))
	u := &user.DefaultInfo{Name: "bob", Groups: []string{"a", "b"}, Extra: map[string][]string{"scopes": {"s"}}}
	w := serve(p, u, http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}})
	if got, want := w.Body.String(), "GET /apis/metrics.k8s.io/v1/nodes?limit=5 as bob of [a b], s"; w.Code != 200 ||
		got != want {
		t.Errorf("%d %q", w.Code, got)
	}
	if w := serve(p, nil, nil); w.Code != http.StatusInternalServerError {
		t.Errorf("without a user: %d", w.Code)
	}
	if !p.Handles("metrics.k8s.io", "v1") || p.Handles("metrics.k8s.io", "v2") {
		t.Error("it handles the wrong group versions")
	}
}

// The feature gate RemoteRequestHeaderUID decides whether an aggregated server receives the UID.
func TestTheFeatureGateSendsTheUID(t *testing.T) {
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Header.Values("X-Remote-Uid"))
	}))
	for enabled, want := range map[bool]string{true: "[7]", false: "[]"} {
		t.Run(fmt.Sprint(enabled), func(t *testing.T) {
			gate := utilfeature.DefaultFeatureGate
			featuregatetesting.SetFeatureGateDuringTest(t, gate, features.RemoteRequestHeaderUID, enabled)
			if got := serve(p, &user.DefaultInfo{Name: "bob", UID: "7"}, nil).Body.String(); got != want {
				t.Error(got)
			}
		})
	}
}

// The trace of a sampled request continues at the aggregated server.
func TestATraceContinuesAtTheServer(t *testing.T) {
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Header.Get("Traceparent"))
	}))
	for flags, want := range map[trace.TraceFlags]string{
		trace.FlagsSampled: "00-01000000000000000000000000000000-0200000000000000-01",
		0:                  "",
	} {
		span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2},
			TraceFlags: flags})
		ctx := request.WithUser(trace.ContextWithSpanContext(t.Context(), span), &user.DefaultInfo{Name: "bob"})
		w := httptest.NewRecorder()
		p.Serve(w, httptest.NewRequestWithContext(ctx, "GET", "/apis/metrics.k8s.io/v1/nodes", nil), "metrics.k8s.io", "v1")
		if got := w.Body.String(); got != want {
			t.Errorf("flags %v: %q", flags, got)
		}
	}
}

// terminations returns the number of requests that the proxy has counted as terminated.
func terminations(t *testing.T) (n float64) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "apiserver_request_terminations_total" {
			for _, m := range f.GetMetric() {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// A server that is unavailable, unreachable, or has an untrusted certificate leads to 503. Only a server that is not
// available counts as a termination, as in kube-aggregator. A redirect is rejected.
func TestUnreachableServerIsUnavailable(t *testing.T) {
	bob := &user.DefaultInfo{Name: "bob"}
	notAvailable, unchecked, unreachable := newAggregatedServer(
		t,
		nil,
	), newAggregatedServer(
		t,
		func(http.ResponseWriter, *http.Request) {},
	), newAggregatedServer(
		t,
		nil,
	)
	notAvailable.Available = false
	unchecked.InsecureSkipTlsVerify = false
	unreachable.Addresses = []string{"127.0.0.1:1"}
	endpointmetrics.Register()
	for name, x := range map[string]struct {
		r       *registryv1.APIService
		counted float64
	}{
		"not available":         {notAvailable, 1},
		"another's certificate": {unchecked, 0},
		"unreachable":           {unreachable, 0},
	} {
		before := terminations(t)
		if w := serve(proxyTo(t, x.r), bob, nil); w.Code != http.StatusServiceUnavailable {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
		if got := terminations(t) - before; got != x.counted {
			t.Errorf("%s: %v terminations, not %v", name, got, x.counted)
		}
	}
	moved := newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://127.0.0.1/secrets", http.StatusFound)
	})
	if w := serve(proxyTo(t, moved), bob, nil); w.Code == http.StatusFound {
		t.Errorf("a redirect is passed on: %v", w.Header())
	}
	broken := newAggregatedServer(t, nil)
	broken.InsecureSkipTlsVerify, broken.CaBundle = false, pem.EncodeToMemory(&pem.Block{
		Type:  "CERTIFICATE",
		Bytes: []byte("x"),
	})
	if w := serve(proxyTo(t, broken), bob, nil); w.Code != http.StatusInternalServerError {
		t.Errorf("a broken authority: %d", w.Code)
	}
}

// Discovery works in both forms, stays cached while the server fails, and is deleted with the APIService.
func TestDiscoveryIsRefreshed(t *testing.T) {
	var down atomic.Bool
	a := newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case down.Load():
			http.Error(w, "down", http.StatusServiceUnavailable)
		case r.URL.Path == "/apis/metrics.k8s.io/v1":
			_ = json.NewEncoder(w).Encode(metav1.APIResourceList{GroupVersion: "metrics.k8s.io/v1",
				APIResources: []metav1.APIResource{{
					Name:         "nodes",
					SingularName: "node",
					Kind:         "NodeMetrics",
					Verbs:        []string{"get"},
				}}})
		case r.URL.Path == "/openapi/v2":
			fmt.Fprint(w, `{"swagger":"2.0"}`)
		default:
			http.NotFound(w, r)
		}
	})
	p := proxyTo(t, a)
	gv := schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1"}
	changed := make(chan struct{}, 10)
	manager := NewDiscoveryManager(p, func() { changed <- struct{}{} })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); manager.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	wait := func() {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(40 * time.Second): // less than refreshInterval
			t.Fatal("discovery does not change")
		}
	}
	wait()
	if got := manager.Lookup(gv); got == nil || got.Stale || len(got.Resources) != 1 ||
		got.Resources[0].Resource != "nodes" {
		t.Errorf("%+v", got)
	}
	wait()
	if got := manager.Lookup(gv); got.OpenAPIV2 == nil {
		t.Errorf("%+v", got)
	}
	down.Store(true)
	moved := proto.Clone(a).(*registryv1.APIService)
	moved.Addresses = append(moved.Addresses, moved.Addresses...)
	p.Set(discovery.NewView(&registryv1.DiscoveryResponse{ApiServices: []*registryv1.APIService{moved}}))
	manager.RefreshSoon()
	wait()
	if got := manager.Lookup(gv); got == nil || !got.Stale || len(got.Resources) != 1 {
		t.Errorf("while it is down: %+v", got)
	}
	p.Set(discovery.NewView(&registryv1.DiscoveryResponse{}))
	manager.RefreshSoon()
	wait()
	if got := manager.Lookup(gv); got != nil || len(manager.GroupVersions()) != 0 {
		t.Errorf("once it is gone: %+v", got)
	}
}

// kube-aggregator's counter counts the requests to a server whose certificate has no SAN.
func TestDeprecatedCertificatesAreCounted(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	s.StartTLS()
	t.Cleanup(s.Close)
	a := newAggregatedServer(t, nil)
	a.Addresses = []string{s.Listener.Addr().String()}
	count := func() (n float64) {
		families, err := legacyregistry.DefaultGatherer.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "apiserver_kube_aggregator_x509_missing_san_total" {
				n += f.Metric[0].GetCounter().GetValue()
			}
		}
		return n
	}
	p := proxyTo(t, a)
	before := count()
	if w := serve(p, &user.DefaultInfo{Name: "bob"}, nil); w.Code != http.StatusOK || count() != before+1 {
		t.Errorf("%d %s: %v requests are counted", w.Code, w.Body, count()-before)
	}
}
