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
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
)

// aggregated returns a handler that has the documents of metrics.k8s.io/v1 from a server. The server responds to the
// paths below /openapi/ with documents.
func aggregated(t *testing.T, documents map[string]string) *Handler {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/openapi/")
		switch {
		case r.URL.Path == "/apis/metrics.k8s.io/v1":
			fmt.Fprint(w, `{"groupVersion":"metrics.k8s.io/v1","resources":[]}`)
		case documents[path] != "":
			fmt.Fprint(w, documents[path])
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
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
	h.servers, h.aggregated = proxy, aggregation.NewDiscoveryManager(proxy, func() { learned <- struct{}{} })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); h.aggregated.Run(ctx) }()
	for range 2 { // discovery, and then the documents
		<-learned
	}
	cancel()
	<-ended
	h.Set(h.view)
	return h
}

const (
	metricsV2 = `{"swagger":"2.0","info":{"title":"m","version":"1"},"paths":{"/apis/metrics.k8s.io/v1/nodes":{}}}`
	metricsV3 = "/openapi/v3/apis/metrics.k8s.io/v1"
)

// Requests for a v3 document of an aggregated server are forwarded. A server cannot replace a document of this system.
func TestRemoteDocumentsAreForwarded(t *testing.T) {
	h := aggregated(t, map[string]string{
		"v3": `{"paths":{"apis/metrics.k8s.io/v1":{"serverRelativeURL":"` + metricsV3 + `?hash=M"},` +
			`"apis/apps/v1":{"serverRelativeURL":"/elsewhere"}}}`,
		"v3/apis/metrics.k8s.io/v1": "of the server",
		"v3/apis/apps/v1":           "of the server",
	})
	index := get(h, "/openapi/v3").Body.String()
	if !strings.Contains(index, metricsV3+"?hash=M") || strings.Contains(index, "elsewhere") {
		t.Errorf("%s", index)
	}
	for path, want := range map[string]bool{metricsV3 + "?hash=M": true, "/openapi/v3/apis/apps/v1": false} {
		req := httptest.NewRequest("GET", path, nil)
		ctx := request.WithUser(req.Context(), &user.DefaultInfo{Name: "bob"})
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req.WithContext(ctx))
		if got := w.Body.String() == "of the server"; w.Code != http.StatusOK || got != want {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}

// A server that has only a v2 document gets a v3 document that is converted from it.
func TestV2IsConverted(t *testing.T) {
	h := aggregated(t, map[string]string{"v2": metricsV2})
	_, hash, ok := strings.Cut(get(h, "/openapi/v3").Body.String(), metricsV3+"?hash=")
	if hash, _, _ = strings.Cut(hash, `"`); !ok {
		t.Fatal("the index lacks the document")
	}
	w := get(h, metricsV3+"?hash="+hash)
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `{"openapi":"3.0.0","info":{"title":"m"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Requests do not hash an aggregated server's documents for their etags, because a document has up to 16 MB.
func TestRemoteDocumentsAreHashedOnce(t *testing.T) {
	h := aggregated(t, map[string]string{"v2": metricsV2})
	ask := func() (all []string) {
		for _, path := range []string{"/openapi/v2", metricsV3} {
			all = append(all, get(h, path).Header().Get("Etag"))
		}
		return append(all, get(h, "/openapi/v3").Body.String())
	}
	before := ask()
	if slices.Contains(before, "") {
		t.Fatalf("%q", before)
	}
	learned := h.aggregated.Lookup(schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1"})
	learned.OpenAPIV2 = []byte(strings.Replace(metricsV2, "nodes", "pods", 1)) // requests do not read it
	if after := ask(); !slices.Equal(before, after) {
		t.Errorf("%q, and then %q", before, after)
	}
	learned.OpenAPIV2Digest = "another"
	h.Set(h.view)
	for i, etag := range ask() {
		if etag == before[i] {
			t.Errorf("%q does not change with the document", etag)
		}
	}
}

// A document without a title and a version is merged too, as in kube-apiserver. An invalid document is omitted.
func TestMergedDocuments(t *testing.T) {
	const path = `"/apis/metrics.k8s.io/v1/nodes"`
	for document, merged := range map[string]bool{
		metricsV2:                                 true,
		`{"paths":{` + path + `:{}}}`:             true,
		`{"paths":{"/apis/apps/v1/nodes":{}}}`:    false,
		`{"paths":{` + path + `:{"get":"text"}}}`: false,
	} {
		h := aggregated(t, map[string]string{"v2": document})
		if w := get(h, "/openapi/v2"); w.Code != http.StatusOK || strings.Contains(w.Body.String(), path) != merged {
			t.Errorf("%s: %d %s", document, w.Code, w.Body)
		}
	}
}

// A large document that is converted has no protobuf encoding. Clients that also accept JSON get JSON.
func TestALargeConvertedDocumentHasNoProtobuf(t *testing.T) {
	for size, code := range map[int]int{10: 200, maxConvertedProtobuf: 406} {
		title := strings.Repeat("x", size)
		h := aggregated(t, map[string]string{"v2": strings.Replace(metricsV2, `"m"`, `"`+title+`"`, 1)})
		if w := get(h, metricsV3, "Accept", protobufType("v3")); w.Code != code {
			t.Errorf("%d bytes in protobuf: %d", size, w.Code)
		}
		if w := get(h, metricsV3, "Accept", protobufType("v3")+";q=0.9,application/json;q=0.5"); w.Code != 200 {
			t.Errorf("%d bytes in protobuf or JSON: %d", size, w.Code)
		}
	}
}

// The index has only the documents of a server's own group, at their own URLs.
func TestAServerPublishesOnlyItsOwnDocuments(t *testing.T) {
	long := metricsV3 + "?hash=" + strings.Repeat("x", 1<<10)
	for entry, accepted := range map[string]bool{
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"` + metricsV3 + `?hash=M"}`:             true,
		`"apis/metrics.k8s.io":{"serverRelativeURL":"/openapi/v3/apis/metrics.k8s.io?hash=M"}`:  true,
		`"apis/metrics.k8s.io/v2":{"serverRelativeURL":"/openapi/v3/apis/metrics.k8s.io/v2"}`:   true,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"https://elsewhere` + metricsV3 + `"}`:   false,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"//elsewhere` + metricsV3 + `"}`:         false,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"@elsewhere/"}`:                          false,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"/api/v1/events?watch=true"}`:            false,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"/openapi/v3/../v3/apis/apps/v1"}`:       false,
		`"apis/metrics.k8s.io/v1":{"serverRelativeURL":"` + long + `"}`:                         false,
		`"apis/zeta.k8s.io/v1":{"serverRelativeURL":"/openapi/v3/apis/zeta.k8s.io/v1?hash=M"}`:  false,
		`"api/apps/v1":{"serverRelativeURL":"/openapi/v3/api/apps/v1?hash=M"}`:                  false,
		`"apis/metrics.k8s.io/v1/x":{"serverRelativeURL":"/openapi/v3/apis/metrics.k8s.io/v1"}`: false,
	} {
		h := aggregated(t, map[string]string{"v3": `{"paths":{` + entry + `}}`})
		root, rest, _ := strings.Cut(strings.TrimPrefix(entry, `"`), `":`)
		index := get(h, "/openapi/v3").Body.String()
		if strings.Contains(index, `"`+root+`":`+rest) != accepted || !accepted && strings.Contains(index, `"`+root+`"`) {
			t.Errorf("%s: %s", entry, index)
		}
	}
}
