package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/lookup"
)

// OpenAPI sends a document in JSON. The gateways cache it.
func (d *Discovery) OpenAPI(r *registryv1.OpenAPIRequest,
	stream grpc.ServerStreamingServer[registryv1.OpenAPIChunk]) error {
	data, err := d.encoded(stream.Context(), r.Path)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return frame.Split(data, frame.ChunkBytes, func(b []byte) error {
		return stream.Send(&registryv1.OpenAPIChunk{Data: b})
	})
}

// encoded makes a document. It makes only one document at a time, and stops between two steps once ctx has ended.
func (c *Discovery) encoded(ctx context.Context, path string) ([]byte, error) {
	select {
	case c.making <- struct{}{}:
		defer func() { <-c.making }()
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	doc, err := c.document(ctx, path)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, apierrors.NewInternalError(err)
	case doc == nil:
		return nil, lookup.NotServed(nil)
	}
	return json.Marshal(doc)
}

func (d *Discovery) document(ctx context.Context, path string) (any, error) {
	doc, ok, err := d.resources.BuiltIn.OpenAPI(path)
	switch {
	case err != nil:
		return nil, err
	case path == "v2":
		builtIn, ok := doc.(*spec.Swagger)
		if !ok {
			return nil, fmt.Errorf("the OpenAPI v2 document is a %T", doc)
		}
		return d.resources.Custom.OpenAPIV2(ctx, builtIn)
	case ok:
		return doc, nil
	}
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(path, "v3/apis/"))
	if err != nil {
		return nil, nil
	}
	v3, err := d.resources.Custom.OpenAPIV3(ctx, gv)
	if v3 == nil {
		return nil, err
	}
	return v3, err
}
