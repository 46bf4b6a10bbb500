package openapi

import (
	"cmp"
	"context"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	openapi_v3 "github.com/google/gnostic-models/openapiv3"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/openapiconv"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// document is a document of registry, or a document that is converted from an aggregated server's v2. Its protobuf
// encoding is built when a client accepts it.
type document struct {
	// inputs is the hash of everything that the document depends on. etag is the hash of its content.
	inputs, etag string
	isV2         bool
	// converted is true for the document of an aggregated server that has only v2.
	converted bool
	modified  time.Time
	json      []byte
	encode    sync.Once
	protobuf  []byte
}

// remoteDocument is a v3 document of an aggregated server.
type remoteDocument struct {
	// server is the group version of the APIService.
	server schema.GroupVersion
	// url is the URL in the server's index.
	url string
}

// Set replaces the view whose documents are served. Documents with unchanged inputs stay cached.
func (h *Handler) Set(v *discovery.View) {
	inputs, remote := maps.Clone(v.Openapi), map[string]remoteDocument{}
	if inputs == nil {
		inputs = map[string]string{}
	}
	for _, gv := range h.aggregated.GroupVersions() {
		discovered := h.aggregated.Lookup(gv)
		if discovered == nil {
			continue
		}
		inputs["v2"] += " " + discovered.OpenAPIV2Digest
		if path := "v3/apis/" + gv.String(); discovered.OpenAPIPaths == nil && discovered.OpenAPIV2 != nil &&
			inputs[path] == "" {
			inputs[path] = discovered.OpenAPIV2Digest
		}
		for root, url := range discovered.OpenAPIPaths {
			path := "v3/" + root
			_, known := remote[path]
			// A server cannot replace other documents. Another server of the group may have published the path first.
			if (!known || root == "apis/"+gv.String()) && inputs[path] == "" {
				remote[path] = remoteDocument{gv, url}
			}
		}
	}
	index := sha512.New()
	for _, path := range slices.Sorted(maps.Keys(inputs)) {
		fmt.Fprintln(index, path, inputs[path])
	}
	for _, path := range slices.Sorted(maps.Keys(remote)) {
		fmt.Fprintf(index, "%s %q\n", path, remote[path].url)
	}
	inputs["v3"] = fmt.Sprintf("%X", index.Sum(nil))
	h.mu.Lock()
	defer h.mu.Unlock()
	h.view, h.inputs, h.remote = v, inputs, remote
	maps.DeleteFunc(h.cached, func(path string, d *document) bool { return d.inputs != inputs[path] })
}

// find reports whether this system has a v3 document, and returns the document of an aggregated server, if any.
func (h *Handler) find(path string) (own bool, remote *remoteDocument) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r, ok := h.remote[path]; ok {
		return false, &r
	}
	return h.view == nil || h.inputs[path] != "", nil
}

// document returns a cached document or builds it. Only requests for the same document wait for a build.
func (h *Handler) document(ctx context.Context, path string) (*document, error) {
	d, _, err := h.lookup(path)
	if d != nil || err != nil {
		return d, err
	}
	return h.builds.Get(ctx, path, func(ctx context.Context) (*document, error) {
		d, inputs, err := h.lookup(path)
		if d != nil || err != nil { // built while this request waited
			return d, err
		}
		data, current, converted, err := h.build(ctx, path)
		if err != nil {
			return nil, err
		}
		d = &document{
			inputs:    inputs,
			etag:      hashOf(data),
			isV2:      path == "v2",
			converted: converted,
			modified:  time.Now(),
			json:      data,
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if current && h.inputs[path] == inputs {
			h.cached[path] = d
		}
		return d, nil
	})
}

// hashOf returns the hash of a document's content, as kube-openapi's handlers compute it.
func hashOf(data []byte) string { return fmt.Sprintf("%X", sha512.Sum512(data)) }

// lookup returns a cached document or nil, and the current hash of its inputs.
func (h *Handler) lookup(path string) (*document, string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.view == nil {
		return nil, "", errors.New("the API is starting")
	}
	return h.cached[path], h.inputs[path], nil
}

// build returns a document in JSON. The documents of aggregated servers are merged, or the document is converted from
// such a document. current is false if the registry has other inputs than the view: the document must not be cached.
func (h *Handler) build(ctx context.Context, path string) (data []byte, current, converted bool, err error) {
	h.mu.Lock()
	view, remote := h.view, h.remote
	h.mu.Unlock()
	if path == "v3" || path == "v2" || view.Openapi[path] != "" {
		var inputs string
		data, inputs, err = h.fetch(ctx, path, view.Openapi[path])
		switch {
		case err != nil:
			return nil, false, false, err
		case path == "v2":
			data, err = h.withAggregatedV2(view, data)
		case path == "v3":
			data, err = h.withAggregatedIndex(ctx, view, remote, data)
		}
		return data, inputs == view.Openapi[path], false, err
	}
	data, err = h.convert(path)
	return data, true, true, err
}

// fetch returns a document of registry, and the inputs that it has there.
func (h *Handler) fetch(ctx context.Context, path, wanted string) (data []byte, inputs string, err error) {
	stream, err := h.registry.OpenAPI(ctx, &registryv1.OpenAPIRequest{Path: path, Inputs: wanted})
	if err == nil {
		err = rpc.Each(stream, func(c *registryv1.OpenAPIChunk) error {
			data, inputs = append(data, c.Data...), cmp.Or(inputs, c.Inputs)
			return nil
		})
	}
	if err != nil {
		return nil, "", rpc.FromStatus(err)
	}
	return data, inputs, nil
}

// withAggregatedIndex adds the documents of aggregated servers to registry's index.
func (h *Handler) withAggregatedIndex(ctx context.Context, view *discovery.View, remote map[string]remoteDocument,
	data []byte) ([]byte, error) {
	type entry struct {
		URL string `json:"serverRelativeURL"`
	}
	var index struct {
		Paths map[string]entry `json:"paths"`
	}
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, err
	}
	for path, document := range remote {
		index.Paths[strings.TrimPrefix(path, "v3/")] = entry{document.url}
	}
	for _, gv := range h.aggregated.GroupVersions() {
		path := "v3/apis/" + gv.String()
		if own, _ := h.find(path); own && view.Openapi[path] == "" {
			d, err := h.document(ctx, path)
			if err != nil {
				slog.Warn("Aggregated server's OpenAPI document is omitted", "groupVersion", gv, "error", err)
				continue
			}
			index.Paths[strings.TrimPrefix(path, "v3/")] = entry{urlOf(path, d.etag)}
		}
	}
	return json.Marshal(index)
}

// convert returns the v3 document of an aggregated server that has only a v2 document.
func (h *Handler) convert(path string) ([]byte, error) {
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(path, "v3/apis/"))
	if err != nil {
		return nil, err
	}
	discovered := h.aggregated.Lookup(gv)
	if discovered == nil {
		return nil, fmt.Errorf("%s is not available", gv)
	}
	v2 := &spec.Swagger{}
	if err := json.Unmarshal(discovered.OpenAPIV2, v2); err != nil {
		return nil, err
	}
	return json.Marshal(openapiconv.ConvertV2ToV3(v2))
}

// withAggregatedV2 merges the v2 documents of aggregated servers into data, by priority as kube-aggregator does. It
// omits a document that cannot be decoded or that would make the result invalid.
func (h *Handler) withAggregatedV2(view *discovery.View, data []byte) ([]byte, error) {
	priority := map[string]int32{}
	for _, g := range view.Groups {
		priority[g.Name] = g.GroupPriorityMinimum
	}
	servers := h.aggregated.GroupVersions()
	slices.SortFunc(servers, func(a, b schema.GroupVersion) int { // APIServices are named version.group
		return cmp.Or(cmp.Compare(priority[b.Group], priority[a.Group]),
			strings.Compare(a.Version+"."+a.Group, b.Version+"."+b.Group))
	})
	var merged *spec.Swagger
	for _, gv := range servers {
		discovered := h.aggregated.Lookup(gv)
		if discovered == nil || discovered.OpenAPIV2 == nil {
			continue
		}
		other := &spec.Swagger{}
		err := json.Unmarshal(discovered.OpenAPIV2, other)
		if err == nil && other.Paths != nil {
			other = aggregator.FilterSpecByPathsWithoutSideEffects(other, []string{"/apis/" + gv.String() + "/"})
			// The merge ignores version and title, but validate requires them.
			other.Swagger = "2.0"
			other.Info = &spec.Info{InfoProps: spec.InfoProps{Title: gv.Group, Version: gv.Version}}
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
	orderKinds(merged)
	return merged.MarshalJSON()
}

// orderKinds orders the keys of the kinds of the aggregator's own group as in the encoding of a struct, because
// kube-aggregator merges that document without decoding it. All other kinds have sorted keys.
func orderKinds(s *spec.Swagger) {
	const key = "x-kubernetes-group-version-kind"
	for path, item := range s.Paths.Paths {
		if !strings.HasPrefix(path, "/apis/apiregistration.k8s.io/") {
			continue
		}
		for _, o := range []*spec.Operation{item.Get, item.Put, item.Post, item.Delete, item.Patch} {
			if o == nil {
				continue
			}
			if kind, ok := o.Extensions[key].(map[string]any); ok {
				o.Extensions[key] = struct {
					Group   any `json:"group"`
					Version any `json:"version"`
					Kind    any `json:"kind"`
				}{kind["group"], kind["version"], kind["kind"]}
			}
		}
	}
}

// validate returns an error if clients cannot decode a document.
func validate(s *spec.Swagger) error {
	data, err := json.Marshal(s)
	if err == nil {
		_, err = openapi_v2.ParseDocument(data)
	}
	return err
}

// maxConvertedProtobuf is the size in bytes above which a converted document has no protobuf encoding. The conversion
// takes many times the size in memory, and the aggregated server chooses the size.
const maxConvertedProtobuf = 2 << 20

// toProtobuf returns the document in protobuf, or nil if it is not valid OpenAPI or too large.
func (d *document) toProtobuf() []byte {
	if d.converted && len(d.json) > maxConvertedProtobuf {
		return nil
	}
	d.encode.Do(func() {
		var doc proto.Message
		var err error
		if d.isV2 {
			doc, err = openapi_v2.ParseDocument(d.json)
		} else {
			doc, err = openapi_v3.ParseDocument(d.json)
		}
		if err == nil {
			d.protobuf, err = proto.Marshal(doc)
		}
		if err != nil {
			slog.Warn("OpenAPI document has no protobuf encoding", "error", err)
		}
	})
	return d.protobuf
}
