// Package openapi serves /openapi/v2 and /openapi/v3. It does not build documents of this system's resources: registry
// does, at the first request. The package caches a document until its hash in the discovery view changes. Requests use
// it from any goroutine.
package openapi

import (
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	openapi_v3 "github.com/google/gnostic-models/openapiv3"
	"github.com/munnerz/goautoneg"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/responsewriters"
)

// Handler serves the documents.
type Handler struct {
	registry registryv1.DiscoveryClient
	// aggregated caches the documents of aggregated servers.
	aggregated *aggregation.DiscoveryManager

	mu     sync.Mutex
	view   *discovery.View
	cached map[string]*document
	// builds shares a document's build among the requests for it.
	builds coalesce.Group[*document]
}

// New returns a handler for the documents of registry and of aggregated servers. A build that has started finishes
// within a minute, even if all its clients leave. Otherwise, clients that give up and return would restart it from the
// beginning each time.
func New(registry registryv1.DiscoveryClient, aggregated *aggregation.DiscoveryManager) *Handler {
	return &Handler{
		registry:   registry,
		aggregated: aggregated,
		builds:     coalesce.Group[*document]{Finish: true, Timeout: time.Minute},
	}
}

// document is a document of registry or of an aggregated server. Its protobuf encoding is built when a client accepts
// it. An aggregated server's document may be invalid OpenAPI, and is then served only as JSON.
type document struct {
	etag string
	// aggregated is set for an aggregated server's document.
	aggregated bool
	json       []byte
	encode     sync.Once
	protobuf   []byte
}

// Set replaces the view whose documents are served. Documents with an unchanged etag stay cached.
func (h *Handler) Set(v *discovery.View) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.view = v
	if h.cached == nil {
		h.cached = map[string]*document{}
	}
	for path, d := range h.cached {
		if d.etag != h.etag(path) {
			delete(h.cached, path)
		}
	}
}

// etag returns a hash of everything that a document depends on. The caller holds the lock.
func (h *Handler) etag(path string) string {
	if discovered := h.aggregatedDiscovery(path); discovered != nil {
		return hashOf(discovered.OpenAPIDigest, path)
	}
	depends := h.view.Openapi[path]
	if path == "v2" {
		for _, gv := range h.aggregated.GroupVersions() {
			if discovered := h.aggregated.Lookup(gv); discovered != nil {
				depends += " " + discovered.OpenAPIV2Digest
			}
		}
	}
	return hashOf(depends, path)
}

// aggregatedDiscovery returns the aggregated server's cache entry for a v3 document, or nil if the document is not a
// server's.
func (h *Handler) aggregatedDiscovery(path string) *aggregation.CachedDiscovery {
	name, ok := strings.CutPrefix(path, "v3/apis/")
	gv, err := schema.ParseGroupVersion(name)
	if !ok || err != nil {
		return nil
	}
	if discovered := h.aggregated.Lookup(gv); discovered != nil && discovered.OpenAPI != nil {
		return discovered
	}
	return nil
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	path := strings.Trim(strings.TrimPrefix(req.URL.Path, "/openapi/"), "/")
	if path == "v3" {
		h.index(w)
		return
	}
	if path != "v2" && !strings.HasPrefix(path, "v3/") {
		responsewriters.NotFound(w, req)
		return
	}
	d, err := h.document(req.Context(), path)
	if err != nil {
		if apierrors.IsNotFound(err) {
			responsewriters.NotFound(w, req)
			return
		}
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	if hash := req.URL.Query().Get("hash"); hash != "" && path != "v2" {
		if hash != d.etag {
			u := *req.URL
			q := u.Query()
			q.Set("hash", d.etag)
			u.RawQuery = q.Encode()
			http.Redirect(w, req, u.String(), http.StatusMovedPermanently)
			return
		}
		w.Header().Set("Cache-Control", "public, immutable")
		w.Header().Set("Expires", time.Now().AddDate(1, 0, 0).Format(time.RFC1123))
	}
	version := strings.SplitN(path, "/", 2)[0]
	data, contentType, ok := d.negotiate(req.Header.Get("Accept"), path, version)
	if !ok {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Etag", `"`+d.etag+`"`)
	w.Header().Add("Vary", "Accept")
	http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(data))
}

// maxRemoteProtobuf is the size in bytes above which an aggregated server's v3 document has no protobuf encoding. The
// conversion takes many times the document's size. kube-apiserver converts none, because it proxies these requests. Its
// own largest document has 1.7 MB.
const maxRemoteProtobuf = 2 << 20

// negotiate chooses an encoding, as kube-openapi's handlers do.
func (d *document) negotiate(accept, path, version string) ([]byte, string, bool) {
	if accept == "" {
		accept = "*/*"
	}
	protobuf := "application/com.github.proto-openapi.spec." + version + ".v1.0+protobuf"
	for _, c := range goautoneg.ParseAccept(accept) {
		if c.Type != "application" && c.Type != "*" {
			continue
		}
		switch c.SubType {
		case "json", "*":
			return d.json, "application/json", true
		case strings.TrimPrefix(protobuf, "application/"),
			"com.github.proto-openapi.spec." + version + "@v1.0+protobuf":
			if d.aggregated && len(d.json) > maxRemoteProtobuf {
				continue
			}
			d.encode.Do(func() { d.protobuf = toProtobuf(path, d.json) })
			return d.protobuf, protobuf, len(d.protobuf) > 0
		}
	}
	return nil, "", false
}

// index writes the paths of the v3 documents with their hashes.
func (h *Handler) index(w http.ResponseWriter) {
	h.mu.Lock()
	v := h.view
	h.mu.Unlock()
	if v == nil {
		http.Error(w, "the API is starting", http.StatusServiceUnavailable)
		return
	}
	type entry struct {
		URL string `json:"serverRelativeURL"`
	}
	paths := map[string]entry{}
	for path, hash := range v.Openapi {
		if p, ok := strings.CutPrefix(path, "v3/"); ok {
			paths[p] = entry{"/openapi/v3/" + p + "?hash=" + hashOf(hash, path)}
		}
	}
	for _, gv := range h.aggregated.GroupVersions() {
		if discovered := h.aggregated.Lookup(gv); discovered != nil && discovered.OpenAPI != nil {
			p := "apis/" + gv.String()
			paths[p] = entry{"/openapi/v3/" + p + "?hash=" + hashOf(discovered.OpenAPIDigest, "v3/"+p)}
		}
	}
	data, err := json.Marshal(map[string]any{"paths": paths})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(data) // without a Content-Type, as in kube-apiserver; Go then sets text/plain
}

// hashOf returns the etag of a document. A document of registry depends only on its hash in the discovery view.
func hashOf(etag, path string) string {
	return fmt.Sprintf("%X", sha512.Sum512([]byte(etag+path)))
}

// document returns a cached document or builds it. Only requests for the same document wait for a build.
func (h *Handler) document(ctx context.Context, path string) (*document, error) {
	d, etag, err := h.lookup(path)
	if d != nil || err != nil {
		return d, err
	}
	return h.builds.Get(ctx, path+" "+etag, func(ctx context.Context) (*document, error) {
		if d, now, err := h.lookup(path); err != nil || d != nil && now == etag { // built while this request waited
			return d, err
		}
		data, err := h.fetch(ctx, path)
		if err != nil {
			return nil, err
		}
		d := &document{etag: etag, json: data}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.etag(path) == etag {
			h.cached[path] = d
		}
		return d, nil
	})
}

// lookup returns a cached document or nil, and the current etag.
func (h *Handler) lookup(path string) (*document, string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.view == nil {
		return nil, "", errors.New("the API is starting")
	}
	etag := h.etag(path)
	if d := h.cached[path]; d != nil && d.etag == etag {
		return d, etag, nil
	}
	if discovered := h.aggregatedDiscovery(path); discovered != nil {
		h.cached[path] = &document{etag: etag, json: discovered.OpenAPI, aggregated: true}
		return h.cached[path], etag, nil
	}
	return nil, etag, nil
}

// fetch gets a document from registry. The v2 document is merged with the documents of aggregated servers.
func (h *Handler) fetch(ctx context.Context, path string) ([]byte, error) {
	var data []byte
	stream, err := h.registry.OpenAPI(ctx, &registryv1.OpenAPIRequest{Path: path})
	if err == nil {
		err = rpc.Each(stream, func(c *registryv1.OpenAPIChunk) error { data = append(data, c.Data...); return nil })
	}
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	if path == "v2" {
		return h.withAggregated(data)
	}
	return data, nil
}

// withAggregated merges the v2 documents of aggregated servers into data. It omits a document that cannot be decoded or
// that would make the result invalid.
func (h *Handler) withAggregated(data []byte) ([]byte, error) {
	var merged *spec.Swagger
	for _, gv := range h.aggregated.GroupVersions() {
		discovered := h.aggregated.Lookup(gv)
		if discovered == nil || discovered.OpenAPIV2 == nil {
			continue
		}
		other := &spec.Swagger{}
		err := json.Unmarshal(discovered.OpenAPIV2, other)
		if err == nil && other.Paths != nil {
			other = aggregator.FilterSpecByPathsWithoutSideEffects(other, []string{"/apis/" + gv.String() + "/"})
			err = validate(other)
		}
		if err == nil && merged == nil {
			merged = &spec.Swagger{}
			if err := json.Unmarshal(data, merged); err != nil {
				return nil, err
			}
		}
		if err == nil && other.Paths != nil {
			err = aggregator.MergeSpecsIgnorePathConflictRenamingDefinitionsAndParameters(merged, other)
		}
		if err != nil {
			slog.Warn("Aggregated server's OpenAPI document is omitted", "groupVersion", gv, "error", err)
		}
	}
	if merged == nil {
		return data, nil
	}
	return json.Marshal(merged)
}

// validate returns an error if clients cannot decode a document.
func validate(s *spec.Swagger) error {
	data, err := json.Marshal(s)
	if err == nil {
		_, err = openapi_v2.ParseDocument(data)
	}
	return err
}

// toProtobuf returns a document in protobuf, or nil if it is not valid OpenAPI.
func toProtobuf(path string, data []byte) []byte {
	var doc proto.Message
	var err error
	if path == "v2" {
		doc, err = openapi_v2.ParseDocument(data)
	} else {
		doc, err = openapi_v3.ParseDocument(data)
	}
	var out []byte
	if err == nil {
		out, err = proto.Marshal(doc)
	}
	if err != nil {
		slog.Warn("OpenAPI document has no protobuf encoding", "document", path, "error", err)
		return nil
	}
	return out
}
