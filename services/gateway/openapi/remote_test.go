package openapi

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
)

// A large document of an aggregated server has no protobuf encoding. Clients that also accept JSON get JSON.
func TestALargeRemoteDocumentHasNoProtobuf(t *testing.T) {
	const protobuf = "application/com.github.proto-openapi.spec.v3.v1.0+protobuf"
	description := ""
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/apis/metrics.k8s.io/v1":
			fmt.Fprint(w, `{"groupVersion":"metrics.k8s.io/v1","resources":[]}`)
		case "/openapi/v3/apis/metrics.k8s.io/v1":
			fmt.Fprintf(w, `{"openapi":"3.0.0","info":{"title":"m","version":"1","description":%q},"paths":{}}`,
				description)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	for size, code := range map[int]int{10: 200, maxRemoteProtobuf: 406} {
		description = strings.Repeat("x", size)
		h := aggregated(t, s)
		const path = "/openapi/v3/apis/metrics.k8s.io/v1"
		if w := get(h, path, "Accept", protobuf); w.Code != code {
			t.Errorf("%d bytes in protobuf: %d", size, w.Code)
		}
		if w := get(h, path, "Accept", protobuf+";q=0.9,application/json;q=0.5"); w.Code != 200 {
			t.Errorf("%d bytes in protobuf or JSON: %d", size, w.Code)
		}
	}
}

// aggregated returns a handler that has the documents of metrics.k8s.io/v1 from a server.
func aggregated(t *testing.T, s *httptest.Server) *Handler {
	t.Helper()
	h, _ := handler(t)
	proxy, err := aggregation.New(&aggregation.Config{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	proxy.Set(discovery.NewView(&registryv1.DiscoveryResponse{ApiServices: []*registryv1.APIService{{
		Group:                 "metrics.k8s.io",
		Version:               "v1",
		Addresses:             []string{strings.TrimPrefix(s.URL, "https://")},
		Available:             true,
		InsecureSkipTlsVerify: true,
	}}}))
	learned := make(chan struct{}, 10)
	h.aggregated = aggregation.NewDiscoveryManager(proxy, func() { learned <- struct{}{} })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); h.aggregated.Run(ctx) }()
	<-learned
	cancel()
	<-ended
	return h
}

// Requests do not hash an aggregated server's documents for their etags, because a document has up to 16 MB.
func TestRemoteDocumentsAreHashedOnce(t *testing.T) {
	document := []byte(`{"swagger":"2.0","info":{"title":"m","version":"1"},"paths":{}}`)
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/apis/metrics.k8s.io/v1" {
			fmt.Fprint(w, `{"groupVersion":"metrics.k8s.io/v1","resources":[]}`)
			return
		}
		_, _ = w.Write(document)
	}))
	t.Cleanup(s.Close)
	h := aggregated(t, s)
	ask := func() (all []string) {
		for _, path := range []string{"/openapi/v2", "/openapi/v3/apis/metrics.k8s.io/v1"} {
			all = append(all, get(h, path).Header().Get("Etag"))
		}
		return append(all, get(h, "/openapi/v3").Body.String())
	}
	before := ask()
	if slices.Contains(before, "") {
		t.Fatalf("%q", before)
	}
	learned := h.aggregated.Lookup(schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1"})
	learned.OpenAPI, learned.OpenAPIV2 = []byte("{}"), []byte("{}") // requests do not read them
	if after := ask(); !slices.Equal(before, after) {
		t.Errorf("%q, and then %q", before, after)
	}
	learned.OpenAPIDigest, learned.OpenAPIV2Digest = "another", "another"
	for i, etag := range ask() {
		if etag == before[i] {
			t.Errorf("%q does not change with the document", etag)
		}
	}
}
