package discovery

import (
	"context"
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/lookup"
)

// documentHash is the hash of a v3 document, and of the inputs from which the document was built.
type documentHash struct{ inputs, content string }

// OpenAPI sends a document in JSON: "v2", "v3" for the index of the v3 documents, or "v3/" and a root path. The
// gateways cache it if its inputs are equal to their view's.
func (d *Discovery) OpenAPI(r *registryv1.OpenAPIRequest,
	stream grpc.ServerStreamingServer[registryv1.OpenAPIChunk]) error {
	inputs := d.awaitInputs(stream.Context(), r.Path, r.Inputs)
	data, err := d.encoded(stream.Context(), r.Path)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return frame.Split(data, func(b []byte) error {
		chunk := &registryv1.OpenAPIChunk{Data: b, Inputs: inputs}
		inputs = "" // only the first chunk has them
		return stream.Send(chunk)
	})
}

// inputsTimeout bounds how long a registry waits for the inputs of a gateway's view.
const inputsTimeout = 500 * time.Millisecond

// awaitInputs waits until a document has the wanted inputs here, for inputsTimeout at most. It returns the inputs that
// the document has. If wanted is empty, it does not wait.
func (d *Discovery) awaitInputs(ctx context.Context, path, wanted string) string {
	ctx, cancel := context.WithTimeout(ctx, inputsTimeout)
	defer cancel()
	for {
		current, changed := d.current.Get()
		inputs := current.GetOpenapi()[path]
		if wanted == "" || inputs == wanted {
			return inputs
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return inputs
		}
	}
}

// encoded makes a document. It makes only one document at a time, and stops between two steps once ctx has ended.
func (d *Discovery) encoded(ctx context.Context, path string) (data []byte, err error) {
	if path != "v3" { // the index takes turns with other documents
		release, err := d.hold(ctx)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	root, isV3 := strings.CutPrefix(path, "v3/")
	if isV3 || path == "v3" {
		defer d.resources.BuiltIn.ReleaseOpenAPIDefinitions()
	}
	switch {
	case path == "v2":
		data, err = d.openAPIV2(ctx)
	case path == "v3":
		data, err = d.openAPIV3Index(ctx)
	case isV3:
		data, err = d.openAPIV3(ctx, root)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, apierrors.NewInternalError(err)
	case data == nil:
		return nil, lookup.NotServed(nil)
	}
	return data, nil
}

// hold waits until no document is made, and prevents others until the caller calls release.
func (d *Discovery) hold(ctx context.Context) (release func(), err error) {
	select {
	case d.making <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	release = func() { <-d.making }
	if err := ctx.Err(); err != nil { // both were ready
		release()
		return nil, err
	}
	return release, nil
}

// openAPIV2 returns the v2 document. Like kube-aggregator, it merges the document of the aggregator's own group with
// the decoded document of everything else. Decoding orders the keys of extensions.
func (d *Discovery) openAPIV2(ctx context.Context) ([]byte, error) {
	aggregators, builtIn, err := d.resources.BuiltIn.OpenAPIV2()
	if err != nil {
		return nil, err
	}
	others, err := d.resources.Custom.OpenAPIV2(ctx, builtIn)
	if err != nil {
		return nil, err
	}
	data, err := others.MarshalJSON()
	if err != nil {
		return nil, err
	}
	decoded := &spec.Swagger{}
	if err := decoded.UnmarshalJSON(data); err != nil {
		return nil, err
	}
	merged := *aggregators
	merged.Paths, merged.Definitions, merged.Parameters = nil, nil, nil
	for _, part := range []*spec.Swagger{aggregators, decoded} {
		if err := aggregator.MergeSpecsIgnorePathConflictRenamingDefinitionsAndParameters(&merged, part); err != nil {
			return nil, err
		}
	}
	return merged.MarshalJSON()
}

// openAPIV3 returns a v3 document, or nil if there is none.
func (d *Discovery) openAPIV3(ctx context.Context, root string) ([]byte, error) {
	if data, err := d.resources.BuiltIn.OpenAPIV3(root); data != nil || err != nil {
		return data, err
	}
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(root, "apis/"))
	if err != nil {
		return nil, nil
	}
	doc, err := d.resources.Custom.OpenAPIV3(ctx, gv)
	if doc == nil || err != nil {
		return nil, err
	}
	return json.Marshal(doc)
}

// openAPIV3Index returns the paths of the v3 documents with the hashes of their contents. It omits a document that
// cannot be built, as kube-apiserver does. It builds only documents whose inputs have changed since the last index, and
// keeps none.
func (d *Discovery) openAPIV3Index(ctx context.Context) ([]byte, error) {
	current, _ := d.current.Get()
	index := handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}}
	for path, inputs := range current.GetOpenapi() {
		root, ok := strings.CutPrefix(path, "v3/")
		if !ok {
			continue
		}
		hash, err := d.hashOf(ctx, root, inputs)
		if err != nil {
			return nil, err
		}
		if hash != "" {
			index.Paths[root] = handler3.OpenAPIV3DiscoveryGroupVersion{
				ServerRelativeURL: "/openapi/v3/" + root + "?hash=" + hash,
			}
		}
	}
	release, err := d.hold(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	for root := range d.hashes {
		if _, ok := current.GetOpenapi()["v3/"+root]; !ok {
			delete(d.hashes, root)
		}
	}
	return json.Marshal(index)
}

// hashOf returns the hash of a v3 document with the given inputs. It is empty if the document cannot be built.
func (d *Discovery) hashOf(ctx context.Context, root, inputs string) (string, error) {
	release, err := d.hold(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	if known := d.hashes[root]; known.inputs == inputs {
		return known.content, nil
	}
	data, err := d.openAPIV3(ctx, root)
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if err != nil {
		slog.Warn("OpenAPI document is omitted", "document", root, "error", err)
	}
	hash := documentHash{inputs: inputs}
	if data != nil {
		hash.content = fmt.Sprintf("%X", sha512.Sum512(data))
	}
	d.hashes[root] = hash
	return hash.content, nil
}
