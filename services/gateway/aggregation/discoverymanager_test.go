package aggregation

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

var metrics = schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1"}

// A discovery response that is too large, in bytes or in values, is not decoded. The server is then stale.
func TestLargeDiscoveryIsRefused(t *testing.T) {
	for name, items := range map[string]string{
		"bytes":   `{"resource":"` + strings.Repeat("x", 60<<20) + `"}`,
		"objects": strings.Repeat(`{},`, 1<<20) + `{}`,
		"nulls":   strings.Repeat(`null,`, 700_000) + `null`,
	} {
		t.Run(name, func(t *testing.T) {
			body := fmt.Appendf(nil, `{"items":[{"metadata":{"name":"metrics.k8s.io"},"versions":`+
				`[{"version":"v1","resources":[%s]}]}]}`, items)
			p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
				if strings.HasPrefix(r.URL.Path, "/openapi/") {
					http.NotFound(w, r)
					return
				}
				w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
				_, _ = w.Write(body)
			}))
			manager := NewDiscoveryManager(p, func() {})
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			manager.refresh(t.Context())
			runtime.ReadMemStats(&after)
			if got := manager.Lookup(metrics); got == nil || !got.Stale || got.Resources != nil {
				t.Errorf("%.200v", got)
			}
			if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; mb > 100 { // two growing reads of 4 MB
				t.Errorf("%d MB are allocated", mb)
			}
		})
	}
}

// A resource without a kind has an empty kind: clients dereference it.
func TestMissingResponseKindsAreEmpty(t *testing.T) {
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
		fmt.Fprint(w, `{"items":[{"metadata":{"name":"metrics.k8s.io"},"versions":[{"version":"v1","resources":[`+
			`{"resource":"pods","subresources":[{"subresource":"status"}]},`+
			`{"resource":"nodes","responseKind":{"kind":"NodeMetrics"}}]}]}]}`)
	}))
	manager := NewDiscoveryManager(p, func() {})
	manager.refresh(t.Context())
	got := manager.Lookup(metrics).Resources
	if len(got) != 2 || got[0].ResponseKind == nil || got[0].Subresources[0].ResponseKind == nil ||
		got[1].ResponseKind.Kind != "NodeMetrics" {
		t.Errorf("got %v", got)
	}
}

// A server that is not available is not asked: a gateway is ready without its response, and others do not wait for it.
func TestAnUnavailableServerIsNotAsked(t *testing.T) {
	server := newAggregatedServer(t, func(http.ResponseWriter, *http.Request) { t.Error("a request arrives") })
	server.Available = false
	manager := NewDiscoveryManager(proxyTo(t, server), func() {})
	manager.refresh(t.Context())
	if got := manager.Lookup(metrics); got == nil || !got.Stale || manager.Err() != nil {
		t.Errorf("got %v, and the error %v", got, manager.Err())
	}
}

// Documents of more than 16 MB or 200,000 values are omitted. The content of a string does not count as values.
func TestLargeDocumentsAreLeftOut(t *testing.T) {
	for name, x := range map[string]struct {
		document string
		kept     bool
	}{
		"sound":   {`{"swagger":"2.0","info":{"description":"` + strings.Repeat(`,{[\"`, 1<<20) + `"}}`, true},
		"bytes":   {`{"swagger":"` + strings.Repeat("x", 16<<20) + `"}`, false},
		"objects": {`{"definitions":[` + strings.Repeat(`{},`, 200_000) + `{}]}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/openapi/v2":
					fmt.Fprint(w, x.document)
				case r.URL.Path == "/apis/metrics.k8s.io/v1":
					fmt.Fprint(w, `{"groupVersion":"metrics.k8s.io/v1","resources":[]}`)
				default:
					http.NotFound(w, r)
				}
			}))
			manager := NewDiscoveryManager(p, func() {})
			manager.refresh(t.Context())
			got := manager.Lookup(metrics)
			if got.Stale || (got.OpenAPIV2 != nil) != x.kept {
				t.Errorf("stale %v, %d bytes", got.Stale, len(got.OpenAPIV2))
			}
		})
	}
}

// A server without discovery has its documents merged. A server that does not answer in time is not asked for them.
func TestDocumentsDoNotDependOnDiscovery(t *testing.T) {
	for _, hangs := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &server{APIService: &registryv1.APIService{Available: true, Addresses: []string{"a:1"}}}
			s.transport = roundTripper(func(r *http.Request) (*http.Response, error) {
				if hangs {
					<-r.Context().Done()
					return nil, r.Context().Err()
				}
				if r.URL.Path != "/openapi/v2" {
					return &http.Response{StatusCode: http.StatusNotFound, Body: http.NoBody}, nil
				}
				return &http.Response{
					StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(`{"swagger":"2.0"}`)),
				}, nil
			})
			m, began := &DiscoveryManager{}, time.Now()
			m.refreshServer(t.Context(), metrics, s)
			if got := m.Lookup(metrics); !got.Stale || (got.OpenAPIV2 == nil) != hangs {
				t.Errorf("hangs %v: stale %v, %d bytes", hangs, got.Stale, len(got.OpenAPIV2))
			}
			if took := time.Since(began); took > fetchTimeout {
				t.Errorf("hangs %v: it took %v", hangs, took)
			}
		})
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// held is a transport whose requests wait until the test lets each fail.
type held struct {
	waiting atomic.Int32
	may     chan struct{}
}

func (h *held) RoundTrip(*http.Request) (*http.Response, error) {
	h.waiting.Add(1)
	defer h.waiting.Add(-1)
	<-h.may
	return nil, errors.New("held")
}

// Concurrent fetches are bounded.
func TestConcurrentFetchesAreBounded(t *testing.T) {
	const servers = 12
	synctest.Test(t, func(t *testing.T) {
		var all []*registryv1.APIService
		for i := range servers {
			all = append(all, &registryv1.APIService{
				Group:     fmt.Sprintf("g%d.example.com", i),
				Version:   "v1",
				Addresses: []string{"192.0.2.1:443"},
				Available: true,
			})
		}
		p, h := proxyTo(t, all...), &held{may: make(chan struct{})}
		for _, s := range *p.servers.Load() {
			s.transport = h
		}
		manager := NewDiscoveryManager(p, func() {})
		go manager.refresh(t.Context())
		for i := range 4 * servers { // the aggregated form, the old form and two documents of each
			synctest.Wait()
			if n := h.waiting.Load(); n > maxConcurrentFetches || i == 0 && n != maxConcurrentFetches {
				t.Errorf("%d concurrent fetches, want %d", n, maxConcurrentFetches)
			}
			h.may <- struct{}{}
		}
		synctest.Wait()
		if h.waiting.Load() != 0 ||
			manager.Lookup(schema.GroupVersion{Group: "g11.example.com", Version: "v1"}) == nil {
			t.Errorf("%d requests are left", h.waiting.Load())
		}
	})
}
