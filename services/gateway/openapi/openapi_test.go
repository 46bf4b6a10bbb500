package openapi

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
)

// apps is the document of apps/v1.
var apps = []byte(`{"openapi":"3.0.0","info":{"title":"Kubernetes","version":"1"},"paths":{}}`)

// fakeRegistry is a registry that counts the documents that it builds.
type fakeRegistry struct {
	registryv1.UnimplementedDiscoveryServer
	calls atomic.Int32
	// finish lets the build of "v3/apis/slow/v1" finish.
	finish chan struct{}
	// behind is true while the registry has other inputs than the gateway's view.
	behind atomic.Bool
}

// inputs returns the inputs of a document at the registry.
func (d *fakeRegistry) inputs(r *registryv1.OpenAPIRequest) string {
	if d.behind.Load() {
		return "older"
	}
	return r.Inputs
}

func (d *fakeRegistry) OpenAPI(
	r *registryv1.OpenAPIRequest,
	s grpc.ServerStreamingServer[registryv1.OpenAPIChunk],
) error {
	d.calls.Add(1)
	switch r.Path {
	case "v3/apis/slow/v1":
		select {
		case <-s.Context().Done():
			return s.Context().Err()
		case <-d.finish:
			return s.Send(&registryv1.OpenAPIChunk{Data: []byte(`{"openapi":"3.0.0"}`), Inputs: d.inputs(r)})
		}
	case "v2":
		return s.Send(
			&registryv1.OpenAPIChunk{Data: []byte(`{"swagger":"2.0","info":{"title":"Kubernetes"},"paths":{}}`),
				Inputs: d.inputs(r)},
		)
	case "v3":
		return s.Send(&registryv1.OpenAPIChunk{Inputs: d.inputs(r), Data: fmt.Appendf(nil,
			`{"paths":{"apis/apps/v1":{"serverRelativeURL":"/openapi/v3/apis/apps/v1?hash=%s"}}}`, hashOf(apps))})
	case "v3/apis/apps/v1":
		if err := s.Send(&registryv1.OpenAPIChunk{Data: apps[:10], Inputs: d.inputs(r)}); err != nil {
			return err
		}
		return s.Send(&registryv1.OpenAPIChunk{Data: apps[10:]})
	}
	return rpc.ToStatus(apierrors.NewNotFound(schema.GroupResource{}, r.Path))
}

func handler(t *testing.T) (*Handler, *fakeRegistry) {
	t.Helper()
	d, p := &fakeRegistry{finish: make(chan struct{})}, rpc.NewInProcess(false)
	registryv1.RegisterDiscoveryServer(p, d)
	proxy, err := aggregation.New(&aggregation.Config{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := New(registryv1.NewDiscoveryClient(p.Client("gateway")), aggregation.NewDiscoveryManager(proxy, func() {}), proxy)
	h.Set(discovery.NewView(&registryv1.DiscoveryResponse{Openapi: map[string]string{
		"v2":              "A",
		"v3":              "B",
		"v3/apis/apps/v1": "B",
		"v3/apis/slow/v1": "B",
	}}))
	return h, d
}

func get(h http.Handler, path string, headers ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest("GET", path, nil)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

// Registry builds each document once. It is addressed by its hash, and is cached until the hash changes.
func TestDocumentsAreBuiltOnce(t *testing.T) {
	h, d := handler(t)
	index := get(h, "/openapi/v3")
	_, hash, _ := strings.Cut(index.Body.String(), "apis/apps/v1?hash=")
	hash, _, _ = strings.Cut(hash, `"`)
	if index.Code != 200 || hash == "" {
		t.Fatalf("%d %s", index.Code, index.Body)
	}
	for range 3 {
		w := get(h, "/openapi/v3/apis/apps/v1?hash="+hash)
		if w.Code != 200 || !strings.Contains(w.Body.String(), `"openapi":"3.0.0","info"`) ||
			w.Header().Get("Etag") == "" {
			t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
		}
	}
	if n := d.calls.Load(); n != 2 { // the index and the document
		t.Errorf("registry is called %d times", n)
	}
	if w := get(h, "/openapi/v3/apis/apps/v1?hash=OLD&x=y"); w.Code != http.StatusMovedPermanently ||
		w.Header().Get("Location") != "/openapi/v3/apis/apps/v1?hash="+hash {
		t.Errorf("an old hash: %d %v", w.Code, w.Header())
	}
	w := get(h, "/openapi/v3/apis/apps/v1")
	if again := get(h, "/openapi/v3/apis/apps/v1", "If-None-Match",
		w.Header().Get("Etag")); again.Code != http.StatusNotModified {
		t.Errorf("with the client's etag: %d", again.Code)
	}
	h.Set(
		discovery.NewView(&registryv1.DiscoveryResponse{Openapi: map[string]string{"v2": "A", "v3": "C",
			"v3/apis/apps/v1": "C"}}),
	)
	get(h, "/openapi/v3/apis/apps/v1")
	if n := d.calls.Load(); n != 3 {
		t.Errorf("registry is called %d times for the index and two documents", n)
	}
}

// A document of a registry that is behind the gateway's view is served, and is not cached.
func TestADocumentOfARegistryThatIsBehindIsNotCached(t *testing.T) {
	h, d := handler(t)
	d.behind.Store(true)
	n := int32(0)
	for _, path := range []string{"/openapi/v2", "/openapi/v3", "/openapi/v3/apis/apps/v1"} {
		for range 2 {
			n++
			if w := get(h, path); w.Code != 200 || d.calls.Load() != n {
				t.Errorf("%s: %d, after %d calls, not %d", path, w.Code, d.calls.Load(), n)
			}
		}
	}
	d.behind.Store(false)
	get(h, "/openapi/v2")
	before := d.calls.Load()
	if get(h, "/openapi/v2"); d.calls.Load() != before {
		t.Error("the document is not cached after the registry has caught up")
	}
}

func TestUnknownDocumentIsNotFound(t *testing.T) {
	h, _ := handler(t)
	for path, code := range map[string]int{"/openapi/v3/apis/none/v1": 404, "/openapi/v9": 404, "/openapi/v2": 200} {
		if w := get(h, path); w.Code != code {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}

// A client that leaves does not wait for a document. The build finishes once, for clients that return.
func TestADocumentIsFinishedWithoutClients(t *testing.T) {
	const path = "/openapi/v3/apis/slow/v1"
	h, d := handler(t)
	ctx, cancel := context.WithCancel(t.Context())
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", path, nil))
	}()
	for d.calls.Load() == 0 {
		runtime.Gosched()
	}
	cancel()
	select {
	case <-answered:
	case <-time.After(2 * time.Minute):
		t.Fatal("the client waits")
	}
	close(d.finish)
	if w := get(h, path); w.Code != 200 {
		t.Errorf("a client that returns gets %d %s", w.Code, w.Body)
	}
	if n := d.calls.Load(); n != 1 {
		t.Errorf("registry is called %d times", n)
	}
}

// A client that has an index from the same second as a change gets the new index. A document without a change is not
// sent again in the same second.
func TestAnIndexOfTheSameSecondIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(100 * time.Millisecond) // the clock begins with a second
		h, _ := handler(t)
		first := get(h, "/openapi/v3").Header().Get("Last-Modified")
		h.Set(discovery.NewView(&registryv1.DiscoveryResponse{Openapi: map[string]string{"v3": "C"}}))
		w := get(h, "/openapi/v3", "If-Modified-Since", first)
		if second := w.Header().Get("Last-Modified"); w.Code != 200 || second != first {
			t.Errorf("after a change: %d, %s after %s", w.Code, second, first)
		}
		time.Sleep(time.Second)
		next := get(h, "/openapi/v3").Header().Get("Last-Modified")
		if w := get(h, "/openapi/v3", "If-Modified-Since", next); w.Code != http.StatusNotModified {
			t.Errorf("without a change: %d", w.Code)
		}
	})
}
