// Package openapi serves /openapi/v2 and /openapi/v3. It does not build documents of this system's resources: registry
// does, at the first request. The package caches a document until the hash of its inputs changes in the discovery view.
// Requests for the v3 documents of aggregated servers are forwarded to the servers. Requests use the package from any
// goroutine.
package openapi

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/NYTimes/gziphandler"
	"github.com/munnerz/goautoneg"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/metrics"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/responsewriters"
)

// Handler serves the documents.
type Handler struct {
	registry registryv1.DiscoveryClient
	// aggregated caches the v2 documents and the v3 indexes of aggregated servers. servers forwards requests to them.
	aggregated *aggregation.DiscoveryManager
	servers    *aggregation.Proxy
	// v2, index and v3 serve the documents of v2, the index of v3 and the documents of v3.
	v2, index, v3 http.Handler

	mu   sync.Mutex
	view *discovery.View
	// inputs are the hashes of everything that a document depends on. remote are the documents of aggregated servers.
	// Both have paths below /openapi/ as keys.
	inputs map[string]string
	remote map[string]remoteDocument
	cached map[string]*document
	// builds shares a document's build among the requests for it.
	builds coalesce.Group[*document]
}

// New returns a handler for the documents of registry and of aggregated servers. A build that has started finishes
// within a minute, even if all its clients leave. Otherwise, clients that give up and return would restart it from the
// beginning each time.
func New(registry registryv1.DiscoveryClient, aggregated *aggregation.DiscoveryManager,
	servers *aggregation.Proxy) *Handler {
	h := &Handler{
		registry:   registry,
		aggregated: aggregated,
		servers:    servers,
		cached:     map[string]*document{},
		builds:     coalesce.Group[*document]{Finish: true, Timeout: time.Minute},
	}
	// kube-apiserver compresses v2 with the same library, and does not compress v3
	h.v2 = gziphandler.GzipHandler(http.HandlerFunc(h.serveV2))
	h.index, h.v3 = monitored("openapi/v3", h.serveIndex), monitored("openapi/v3/", h.serveV3)
	return h
}

// monitored returns a handler that records requests under a fixed name, as kube-aggregator does for v3.
func monitored(name string, serve http.HandlerFunc) http.Handler {
	return metrics.InstrumentHandlerFunc(http.MethodGet, "", "", "", name, "", "", false, "", serve)
}

// ServeHTTP implements http.Handler. It responds as kube-openapi's handlers do at 1.36, and as the OpenAPI aggregators
// of k8s.io/kube-aggregator/pkg/controllers do.
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	switch path := strings.TrimPrefix(req.URL.Path, "/openapi/"); {
	case path == "v2":
		h.v2.ServeHTTP(w, req)
	case path == "v3":
		h.index.ServeHTTP(w, req)
	case strings.HasPrefix(path, "v3/"):
		h.v3.ServeHTTP(w, req)
	default:
		responsewriters.NotFound(w, req)
	}
}

func (h *Handler) serveV2(w http.ResponseWriter, req *http.Request) {
	w.Header().Add("Vary", "Accept")
	mediaTypes := negotiate(req.Header.Get("Accept"), "v2")
	if len(mediaTypes) == 0 {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	if d := h.get(w, req, "v2"); d != nil {
		d.serve(w, req, mediaTypes)
	}
}

// serveIndex serves the paths of the v3 documents. The response has no Content-Type, as in kube-apiserver; Go then sets
// text/plain.
func (h *Handler) serveIndex(w http.ResponseWriter, req *http.Request) {
	if d := h.get(w, req, "v3"); d != nil {
		// A client may have an older index from the same second. kube-apiserver responds to it with 304.
		since, err := http.ParseTime(req.Header.Get("If-Modified-Since"))
		if err == nil && d.modified.Unix() >= since.Unix() {
			req.Header.Del("If-Modified-Since")
		}
		http.ServeContent(w, req, req.URL.Path, time.Now(), bytes.NewReader(d.json))
	}
}

func (h *Handler) serveV3(w http.ResponseWriter, req *http.Request) {
	path := strings.TrimPrefix(req.URL.Path, "/openapi/")
	own, remote := h.find(path)
	switch {
	case remote != nil:
		h.servers.Serve(w, req, remote.server.Group, remote.server.Version)
		return
	case !own:
		w.WriteHeader(http.StatusNotFound)
		return
	}
	w.Header().Add("Vary", "Accept")
	mediaTypes := negotiate(req.Header.Get("Accept"), "v3")
	if len(mediaTypes) == 0 {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	d := h.get(w, req, path)
	if d == nil {
		return
	}
	if hash := req.URL.Query().Get("hash"); hash != "" {
		if hash != d.etag {
			d.setHeaders(w, mediaTypes[0])
			http.Redirect(w, req, urlOf(path, d.etag), http.StatusMovedPermanently)
			return
		}
		w.Header().Set("Cache-Control", "public, immutable")
		w.Header().Set("Expires", time.Now().AddDate(1, 0, 0).Format(time.RFC1123))
	}
	d.serve(w, req, mediaTypes)
}

// urlOf returns the URL of a v3 document with the hash of its content.
func urlOf(path, etag string) string { return "/openapi/" + path + "?hash=" + etag }

// get returns a document, or nil after it has written an error.
func (h *Handler) get(w http.ResponseWriter, req *http.Request, path string) *document {
	d, err := h.document(req.Context(), path)
	switch {
	case err == nil:
		return d
	case apierrors.IsNotFound(err):
		w.WriteHeader(http.StatusNotFound)
	default:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	}
	return nil
}

const jsonType = "application/json"

// protobufType returns the media type of a version's documents in protobuf.
func protobufType(version string) string {
	return "application/com.github.proto-openapi.spec." + version + ".v1.0+protobuf"
}

// negotiate returns the media types that the client accepts, in the order of its preference.
func negotiate(accept, version string) (mediaTypes []string) {
	if accept == "" {
		accept = "*/*"
	}
	protobuf := protobufType(version)
	deprecated := strings.Replace(protobuf, version+".v1.0", version+"@v1.0", 1)
	for _, c := range goautoneg.ParseAccept(accept) {
		if c.Type != "application" && c.Type != "*" {
			continue
		}
		switch "application/" + c.SubType {
		case jsonType, "application/*":
			mediaTypes = append(mediaTypes, jsonType)
		case protobuf, deprecated:
			mediaTypes = append(mediaTypes, protobuf)
		}
	}
	return mediaTypes
}

// serve writes the document in the first of mediaTypes in which it is available. Conditional requests get 304.
func (d *document) serve(w http.ResponseWriter, req *http.Request, mediaTypes []string) {
	for _, mediaType := range mediaTypes {
		data := d.json
		if mediaType != jsonType {
			data = d.toProtobuf()
		}
		if data != nil {
			d.setHeaders(w, mediaType)
			http.ServeContent(w, req, "", d.modified, bytes.NewReader(data))
			return
		}
	}
	w.WriteHeader(http.StatusNotAcceptable)
}

func (d *document) setHeaders(w http.ResponseWriter, mediaType string) {
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Etag", fmt.Sprintf("%q", d.etag))
}
