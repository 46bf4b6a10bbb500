package routing

import (
	"context"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// get serves an object from registry.
func (c *requestContext) get() {
	r := c.getRequest()
	ctx := c.withAffinity(c.req.Context(), r.Namespace, r.Name)
	resp, err := rpc.Hedged(ctx, rpc.HedgeDelay, func(ctx context.Context) (*registryv1.ObjectResponse, error) {
		return c.router.Objects.Get(ctx, r)
	})
	if err != nil {
		c.fail(rpc.FromStatus(err))
		return
	}
	c.writeResponse(resp)
}

func (c *requestContext) getRequest() *registryv1.GetRequest {
	return &registryv1.GetRequest{
		Resource:  c.apiResource.Resource,
		Namespace: c.namespace(),
		Name:      c.info.Name,
		User:      c.user,
		Query:     c.req.URL.RawQuery,
		Output:    c.out,
	}
}
