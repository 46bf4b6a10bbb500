package catalog

import (
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
	"watershed.dev/services/registry/resources"
)

// OpenAPI sends one document in JSON.
func (c *Catalog) OpenAPI(r *registryv1.OpenAPIRequest,
	stream grpc.ServerStreamingServer[registryv1.OpenAPIChunk]) error {
	doc, err := c.document(r.Path)
	if err != nil {
		return rpc.ToStatus(apierrors.NewInternalError(err))
	}
	if doc == nil {
		return rpc.ToStatus(resources.NotServed(nil))
	}
	data, err := json.Marshal(doc)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return frame.Split(data, frame.ChunkBytes, func(b []byte) error {
		return stream.Send(&registryv1.OpenAPIChunk{Data: b})
	})
}

func (c *Catalog) document(path string) (any, error) {
	doc, ok, err := c.resources.BuiltIn.OpenAPI(path)
	switch {
	case err != nil:
		return nil, err
	case path == "v2":
		builtIn, ok := doc.(*spec.Swagger)
		if !ok {
			return nil, fmt.Errorf("the document of v2 is a %T", doc)
		}
		return c.resources.Custom.OpenAPIV2(builtIn)
	case ok:
		return doc, nil
	}
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(path, "v3/apis/"))
	if err != nil {
		return nil, nil
	}
	v3, err := c.resources.Custom.OpenAPIV3(gv)
	if v3 == nil {
		return nil, err
	}
	return v3, err
}
