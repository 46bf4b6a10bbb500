// Package openapi serves /openapi/v2 and /openapi/v3. Registry makes the documents when they are first asked for; the
// gateway keeps them for as long as the catalog is the same.
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
	// aggregated knows what other servers say of themselves.
	aggregated *aggregation.DiscoveryManager

	mu     sync.Mutex
	view   *discovery.View
	cached map[string]*document
	// builds shares the making of a document among the requests for it.
	builds coalesce.Group[*document]
}

// New returns a handler of the documents that registry and other servers have. A document that is being made is
// finished, within a minute, after all its clients have left. Clients that give up and return would otherwise have it
// made from the beginning each time.
func New(registry registryv1.DiscoveryClient, aggregated *aggregation.DiscoveryManager) *Handler {
	return &Handler{
		registry:   registry,
		aggregated: aggregated,
		builds:     coalesce.Group[*document]{Finish: true, Timeout: time.Minute},
	}
}

// document is what registry or another server has made. Its protobuf is made when a client asks for that: what another
// server says may be no proper OpenAPI, and is then served as it came.
type document struct {
	etag string
	// aggregated: an aggregated server's own.
	aggregated bool
	json       []byte
	encode     sync.Once
	protobuf   []byte
}

// Set makes v the view whose documents are served. What is the same stays.
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

// etag names what a document is made of. The caller holds the lock.
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

// aggregatedDiscovery is what another server says of itself, where a document of v3 is its.
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

// maxRemoteProtobuf is how large an aggregated server's document of v3 may be to be served in protobuf. The conversion
// takes many times the document's size. kube-apiserver converts none: it proxies these requests. Its own largest
// document has 1.7 MB.
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
		case strings.TrimPrefix(protobuf, "application/"), "com.github.proto-openapi.spec." + version + "@v1.0+protobuf":
			if d.aggregated && len(d.json) > maxRemoteProtobuf {
				continue
			}
			d.encode.Do(func() { d.protobuf = toProtobuf(path, d.json) })
			return d.protobuf, protobuf, len(d.protobuf) > 0
		}
	}
	return nil, "", false
}

// index names the documents of v3 and their hashes.
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
	_, _ = w.Write(data) // without a Content-Type, as kube-apiserver: Go takes it for text
}

// hashOf names one document: what registry makes depends on nothing but the hash that the catalog has of it.
func hashOf(etag, path string) string {
	return fmt.Sprintf("%X", sha512.Sum512([]byte(etag+path)))
}

// document finds or makes one. Nobody else waits while it is made, but those who want the same.
func (h *Handler) document(ctx context.Context, path string) (*document, error) {
	d, etag, err := h.lookup(path)
	if d != nil || err != nil {
		return d, err
	}
	return h.builds.Get(ctx, path+" "+etag, func(ctx context.Context) (*document, error) {
		if d, now, err := h.lookup(path); err != nil || d != nil && now == etag { // made while this one waited
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

// lookup is a document that has been made, or nil, and its etag as it is now.
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

// fetch has registry make a document, within a minute; that of v2 holds what others serve too.
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

// withAggregated adds what other servers say of their group versions to the document of v2. What cannot be read, or would spoil
// the rest, is left out.
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
			slog.Warn("An aggregated server's OpenAPI is left out", "group", gv, "error", err)
		}
	}
	if merged == nil {
		return data, nil
	}
	return json.Marshal(merged)
}

// validate says whether a document is one that clients can read.
func validate(s *spec.Swagger) error {
	data, err := json.Marshal(s)
	if err == nil {
		_, err = openapi_v2.ParseDocument(data)
	}
	return err
}

// toProtobuf is nil where the document is not what OpenAPI allows.
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
		slog.Warn("A document of OpenAPI has no protobuf", "document", path, "error", err)
		return nil
	}
	return out
}
