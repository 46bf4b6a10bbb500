// Package openapi serves /openapi/v2 and /openapi/v3. Registry makes the documents when they are first asked for; the
// gateway keeps them for as long as the catalogue is the same.
package openapi

import (
	"context"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/gnostic-models/openapiv2"
	"github.com/google/gnostic-models/openapiv3"
	"github.com/munnerz/goautoneg"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/edge"
	"watershed.dev/services/gateway/routing"
)

// Handler serves the documents.
type Handler struct {
	Registry registryv1.RegistryClient
	// Remotes knows what other servers say of themselves.
	Remotes *aggregation.Learner

	mu   sync.Mutex
	view *routing.View
	made map[string]*document
}

type document struct {
	json, protobuf []byte
	etag           string
}

// Set makes v the view whose documents are served.
func (h *Handler) Set(v *routing.View) {
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.view
	h.view = v
	delete(h.made, "v2")       // a remote server may say something new
	for path := range h.made { // what is the same stays
		if old == nil || old.Openapi[path] != v.Openapi[path] {
			delete(h.made, path)
		}
	}
	if h.made == nil {
		h.made = map[string]*document{}
	}
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	path := strings.Trim(strings.TrimPrefix(req.URL.Path, "/openapi/"), "/")
	if path == "v3" {
		h.index(w)
		return
	}
	if path != "v2" && !strings.HasPrefix(path, "v3/") {
		edge.NotFound(w, req)
		return
	}
	d, err := h.document(req.Context(), path)
	if err != nil {
		if strings.Contains(err.Error(), "404 page not found") {
			edge.NotFound(w, req)
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
	data, contentType, ok := d.accepted(req.Header.Get("Accept"), version)
	if !ok {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Etag", `"`+d.etag+`"`)
	w.Header().Add("Vary", "Accept")
	http.ServeContent(w, req, "", time.Time{}, strings.NewReader(string(data)))
}

// accepted chooses an encoding, as kube-openapi's handlers do.
func (d *document) accepted(accept, version string) ([]byte, string, bool) {
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
		case "com.github.proto-openapi.spec." + version + ".v1.0+protobuf", "com.github.proto-openapi.spec." + version + "@v1.0+protobuf":
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
	for _, gv := range h.Remotes.Groups() {
		if learned := h.Remotes.Of(gv); learned != nil && learned.OpenAPI != nil {
			p := "apis/" + gv.String()
			paths[p] = entry{"/openapi/v3/" + p + "?hash=" + hashOf(string(learned.OpenAPI), "v3/"+p)}
		}
	}
	data, err := json.Marshal(map[string]any{"paths": paths})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(data) // without a Content-Type, as kube-apiserver: Go takes it for text
}

// hashOf names one document: what registry makes depends on nothing but the hash that the catalogue has of it.
func hashOf(etag, path string) string {
	return fmt.Sprintf("%X", sha512.Sum512([]byte(etag+path)))
}

func (h *Handler) document(ctx context.Context, path string) (*document, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.view == nil {
		return nil, errors.New("the API is starting")
	}
	if gv, err := schema.ParseGroupVersion(strings.TrimPrefix(path, "v3/apis/")); err == nil && path != "v2" {
		if learned := h.Remotes.Of(gv); learned != nil && learned.OpenAPI != nil {
			p, err := toProtobuf(path, learned.OpenAPI)
			return &document{json: learned.OpenAPI, protobuf: p, etag: hashOf(string(learned.OpenAPI), path)}, err
		}
	}
	if d, ok := h.made[path]; ok {
		return d, nil
	}
	stream, err := h.Registry.OpenAPI(ctx, &registryv1.OpenAPIRequest{Path: path})
	d := &document{etag: hashOf(h.view.Openapi[path], path)}
	for err == nil {
		var chunk *registryv1.OpenAPIChunk
		if chunk, err = stream.Recv(); err == nil {
			d.json = append(d.json, chunk.Data...)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, rpc.FromStatus(err)
	}
	if path == "v2" {
		if d.json, err = h.merged(ctx, d.json); err != nil {
			return nil, err
		}
		d.etag = hashOf(string(d.json), path)
	}
	if d.protobuf, err = toProtobuf(path, d.json); err != nil {
		return nil, err
	}
	h.made[path] = d
	return d, nil
}

// merged adds what other servers say of their group versions to the document of v2. One that does not answer is left out.
func (h *Handler) merged(ctx context.Context, data []byte) ([]byte, error) {
	var all *spec.Swagger
	for _, gv := range h.Remotes.Groups() {
		theirs, err := h.Remotes.OpenAPIV2(ctx, gv)
		if err != nil {
			slog.Debug("An aggregated server has no OpenAPI", "group", gv, "error", err)
			continue
		}
		other := &spec.Swagger{}
		if err := json.Unmarshal(theirs, other); err != nil {
			slog.Warn("An aggregated server's OpenAPI cannot be read", "group", gv, "error", err)
			continue
		}
		if all == nil {
			all = &spec.Swagger{}
			if err := json.Unmarshal(data, all); err != nil {
				return nil, err
			}
		}
		other = aggregator.FilterSpecByPathsWithoutSideEffects(other, []string{"/apis/" + gv.String() + "/"})
		if err := aggregator.MergeSpecsIgnorePathConflictRenamingDefinitionsAndParameters(all, other); err != nil {
			slog.Warn("An aggregated server's OpenAPI does not fit", "group", gv, "error", err)
		}
	}
	if all == nil {
		return data, nil
	}
	return json.Marshal(all)
}

func toProtobuf(path string, data []byte) ([]byte, error) {
	if path == "v2" {
		doc, err := openapi_v2.ParseDocument(data)
		if err != nil {
			return nil, err
		}
		return proto.Marshal(doc)
	}
	doc, err := openapi_v3.ParseDocument(data)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(doc)
}
