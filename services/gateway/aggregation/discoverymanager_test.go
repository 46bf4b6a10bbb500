package aggregation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/discovery"
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
			fetchAll(t.Context(), manager)
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
	fetchAll(t.Context(), manager)
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
	fetchAll(t.Context(), manager)
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
			fetchAll(t.Context(), manager)
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
			m := managerOf(t, func(r *http.Request) (*http.Response, error) {
				switch {
				case hangs:
					<-r.Context().Done()
					return nil, r.Context().Err()
				case r.URL.Path != "/openapi/v2":
					return response(http.StatusNotFound, "", ""), nil
				}
				return response(http.StatusOK, "", `{"swagger":"2.0"}`), nil
			}, metrics)
			began := time.Now()
			fetchAll(t.Context(), m)
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

func response(code int, contentType, body string) *http.Response {
	return &http.Response{
		StatusCode: code,
		Header:     http.Header{"Content-Type": {contentType}},
		Body:       io.NopCloser(strings.NewReader(body)),
	}
}

const (
	aggregatedType = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	aggregatedBody = `{"items":[{"metadata":{"name":"metrics.k8s.io"},"versions":[{"version":"v1",` +
		`"resources":[{"resource":"pods"}]}]}]}`
)

// fetchAll fetches once from each server.
func fetchAll(ctx context.Context, m *DiscoveryManager) {
	for _, gv := range m.GroupVersions() {
		newFetcher(m, gv).fetch(ctx)
	}
}

// managerOf returns a manager of available servers with a transport.
func managerOf(t *testing.T, rt roundTripper, all ...schema.GroupVersion) *DiscoveryManager {
	t.Helper()
	var apiServices []*registryv1.APIService
	for _, gv := range all {
		apiServices = append(apiServices, &registryv1.APIService{
			Group: gv.Group, Version: gv.Version, Addresses: []string{gv.Group + ":443"}, Available: true,
		})
	}
	p := proxyTo(t, apiServices...)
	for _, s := range *p.servers.Load() {
		s.transport = rt
	}
	return NewDiscoveryManager(p, func() {})
}

// runManager runs m until the end of the test.
func runManager(t *testing.T, m *DiscoveryManager) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

// A server that hangs delays no other server, however many hang.
func TestAHangingServerDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := []schema.GroupVersion{metrics}
		for i := range 3 * maxConcurrentReads {
			all = append(all, schema.GroupVersion{Group: fmt.Sprintf("hang%d.example.com", i), Version: "v1"})
		}
		m := managerOf(t, func(r *http.Request) (*http.Response, error) {
			if r.URL.Host == "metrics.k8s.io:443" && r.URL.Path == "/apis" {
				return response(http.StatusOK, aggregatedType, aggregatedBody), nil
			}
			<-r.Context().Done()
			return nil, r.Context().Err()
		}, all...)
		runManager(t, m)
		synctest.Wait()
		if got := m.Lookup(metrics); got == nil || got.Stale || len(got.Resources) != 1 {
			t.Errorf("got %v before its documents and the other servers", got)
		}
		if m.Err() == nil {
			t.Error("the other servers are known too")
		}
		time.Sleep(fetchTimeout)
		synctest.Wait()
		if err := m.Err(); err != nil {
			t.Error(err)
		}
	})
}

// A failed fetch is repeated after 500 ms, 1 s, 2 s and so on. A deleted server is forgotten.
func TestAFailedFetchIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		m := managerOf(t, func(r *http.Request) (*http.Response, error) {
			if r.URL.Path != "/apis" {
				return response(http.StatusNotFound, "", ""), nil
			}
			if at = append(at, time.Since(began)); len(at) <= 3 {
				return nil, errors.New("refused")
			}
			return response(http.StatusOK, aggregatedType, aggregatedBody), nil
		}, metrics)
		runManager(t, m)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		want := []time.Duration{0, minRetryDelay, 3 * minRetryDelay, 7 * minRetryDelay,
			7*minRetryDelay + refreshInterval}
		if !slices.Equal(at, want) || m.Lookup(metrics).Stale {
			t.Errorf("fetches after %v, not %v", at, want)
		}
		m.proxy.Set(discovery.NewView(&registryv1.DiscoveryResponse{}))
		m.RefreshSoon()
		synctest.Wait()
		if got := m.Lookup(metrics); got != nil {
			t.Errorf("a deleted server has %v", got)
		}
	})
}

// Only a changed server is fetched before the end of the interval.
func TestOnlyAChangedServerIsFetched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fetches := map[string]int{}
		var mu sync.Mutex
		transport := roundTripper(func(r *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			fetches[r.URL.Host+r.URL.Path]++
			return response(http.StatusOK, aggregatedType, `{}`), nil
		})
		m := managerOf(t, transport, metrics, schema.GroupVersion{Group: "other.example.com", Version: "v1"})
		runManager(t, m)
		synctest.Wait()
		var changed []*registryv1.APIService
		for _, s := range *m.proxy.servers.Load() {
			a := proto.Clone(s.APIService).(*registryv1.APIService)
			if a.Group == metrics.Group {
				a.Addresses = []string{"moved:443"}
			}
			changed = append(changed, a)
		}
		m.proxy.Set(discovery.NewView(&registryv1.DiscoveryResponse{ApiServices: changed}))
		m.RefreshSoon()
		synctest.Wait()
		if fetches["moved:443/apis"] != 1 || fetches["metrics.k8s.io:443/apis"] != 1 ||
			fetches["other.example.com:443/apis"] != 1 {
			t.Errorf("fetches: %v", fetches)
		}
	})
}

// A response with an ETag is not sent again while it does not change.
func TestUnchangedResponsesAreNotSentAgain(t *testing.T) {
	sent := map[string]int{}
	m := managerOf(t, func(r *http.Request) (*http.Response, error) {
		if r.Header.Get("If-None-Match") == `"`+r.URL.Path+`"` {
			return response(http.StatusNotModified, "", ""), nil
		}
		sent[r.URL.Path]++
		resp := response(http.StatusOK, "", `{"paths":{}}`)
		if r.URL.Path == "/apis" {
			resp = response(http.StatusOK, aggregatedType, aggregatedBody)
		}
		resp.Header.Set("ETag", `"`+r.URL.Path+`"`)
		return resp, nil
	}, metrics)
	f := newFetcher(m, metrics)
	for range 2 {
		f.fetch(t.Context())
		if got := m.Lookup(metrics); got.Stale || len(got.Resources) != 1 || got.OpenAPIV2 == nil ||
			got.OpenAPIPaths == nil {
			t.Errorf("got %v", got)
		}
	}
	if want := map[string]int{"/apis": 1, "/openapi/v2": 1, "/openapi/v3": 1}; !maps.Equal(sent, want) {
		t.Errorf("sent %v", sent)
	}
}

// Fetches have the users and the fallback of kube-aggregator: a server without the group version is current, and 503
// has no fallback.
func TestFetchesAreKubeAggregators(t *testing.T) {
	const old = `{"groupVersion":"metrics.k8s.io/v1","resources":[]}`
	const discovery, documents = "/apis system:kube-aggregator [system:masters]",
		"/openapi/v3 system:aggregator [], /openapi/v2 system:aggregator []"
	for name, x := range map[string]struct {
		apis, old *http.Response
		stale     bool
		want      string
	}{
		"another group version": {response(200, aggregatedType, `{}`), nil, false, discovery + ", " + documents},
		"no aggregated form": {response(406, "", ""), response(200, "", old), false,
			discovery + ", /apis/metrics.k8s.io/v1 system:kube-aggregator [], " + documents},
		"the old form at /apis": {response(200, "application/json", `{}`), response(404, "", ""), true,
			discovery + ", /apis/metrics.k8s.io/v1 system:kube-aggregator [], " + documents},
		"unavailable": {response(503, "", ""), response(200, "", old), true, discovery + ", " + documents},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			m := managerOf(t, func(r *http.Request) (*http.Response, error) {
				got = append(got, fmt.Sprint(r.URL.Path, " ", r.Header.Get("X-Remote-User"), " ",
					r.Header.Values("X-Remote-Group")))
				switch r.URL.Path {
				case "/apis":
					return x.apis, nil
				case "/apis/metrics.k8s.io/v1":
					return x.old, nil
				}
				return response(404, "", ""), nil
			}, metrics)
			fetchAll(t.Context(), m)
			d := m.Lookup(metrics)
			if all := strings.Join(got, ", "); all != x.want || d.Stale != x.stale || (d.Resources == nil) != x.stale {
				t.Errorf("%s; %v", all, d)
			}
		})
	}
}

// held is a body whose reads wait until the test lets each fail.
type held struct {
	waiting *atomic.Int32
	may     chan struct{}
}

func (h held) Read([]byte) (int, error) {
	h.waiting.Add(1)
	defer h.waiting.Add(-1)
	<-h.may
	return 0, errors.New("held")
}

// trickle is a body that sends a space each 100 ms, and ends shortly before the timeout.
type trickle struct{ left int }

func newTrickle() *trickle { return &trickle{int(fetchTimeout/(100*time.Millisecond)) - 1} }

func (b *trickle) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	b.left--
	time.Sleep(100 * time.Millisecond)
	return copy(p, " "), nil
}

// Servers that trickle small bodies delay no other. Large bodies wait for their turns, and no server becomes stale.
func TestATricklingServerMakesNoOtherStale(t *testing.T) {
	for name, padding := range map[string]string{"small": "", "large": strings.Repeat(" ", smallResponse)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all := []schema.GroupVersion{metrics}
				for i := range 3 * maxConcurrentReads {
					all = append(all, schema.GroupVersion{Group: fmt.Sprintf("slow%d.example.com", i), Version: "v1"})
				}
				var fetches atomic.Int32
				m := managerOf(t, func(r *http.Request) (*http.Response, error) {
					if r.URL.Path != "/apis" {
						return response(http.StatusNotFound, "", ""), nil
					}
					fetches.Add(1)
					resp := response(http.StatusOK, aggregatedType, aggregatedBody+padding)
					if r.URL.Host != "metrics.k8s.io:443" {
						resp.Body = io.NopCloser(io.MultiReader(resp.Body, newTrickle()))
					}
					return resp, nil
				}, all...)
				runManager(t, m)
				if padding == "" {
					synctest.Wait()
					if got := m.Lookup(metrics); got == nil || got.Stale || len(got.Resources) != 1 {
						t.Errorf("got %v before the other servers", got)
					}
				}
				time.Sleep(4 * fetchTimeout)
				synctest.Wait()
				for _, gv := range all {
					if got := m.Lookup(gv); got == nil || got.Stale {
						t.Errorf("%s: %v", gv, got)
					}
				}
				if n := int(fetches.Load()); n != len(all) {
					t.Errorf("%d fetches from %d servers", n, len(all))
				}
			})
		})
	}
}

// Concurrent reads of large responses are bounded.
func TestConcurrentReadsAreBounded(t *testing.T) {
	const servers = 3 * maxConcurrentReads
	synctest.Test(t, func(t *testing.T) {
		h := held{new(atomic.Int32), make(chan struct{})}
		var all []schema.GroupVersion
		for i := range servers {
			all = append(all, schema.GroupVersion{Group: fmt.Sprintf("g%d.example.com", i), Version: "v1"})
		}
		m := managerOf(t, func(r *http.Request) (*http.Response, error) {
			if r.URL.Path != "/apis" {
				return response(http.StatusNotFound, "", ""), nil
			}
			large := io.MultiReader(strings.NewReader(strings.Repeat(" ", smallResponse)), h)
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(large)}, nil
		}, all...)
		runManager(t, m)
		for i := range servers {
			synctest.Wait()
			if n := h.waiting.Load(); n > maxConcurrentReads || i == 0 && n != maxConcurrentReads {
				t.Errorf("%d concurrent reads, want %d", n, maxConcurrentReads)
			}
			h.may <- struct{}{}
		}
		synctest.Wait()
		if err := m.Err(); err != nil || h.waiting.Load() != 0 {
			t.Errorf("%d reads are left: %v", h.waiting.Load(), err)
		}
	})
}
