package routing

import (
	"context"
	"net/http"

	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// get serves an object from the watch tier, if planGet allows it and the tier holds the object, or from registry.
func (c *requestContext) get() {
	if r := c.planGet(); r != nil {
		if body, ok := c.getFromTier(r); ok {
			c.writeResponse(&registryv1.ObjectResponse{Code: http.StatusOK, Body: body})
			return
		}
	}
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

// getFromTier returns an object's encoded bytes from the watch tier. ok is false if the tier cannot serve it.
func (c *requestContext) getFromTier(r *watchfanoutv1.GetRequest) (body []byte, ok bool) {
	ctx, cancel := context.WithTimeout(c.req.Context(), tierTimeout)
	defer cancel()
	resp, err := c.router.TierGets.Get(rpc.WithHashKey(ctx, c.apiResource.StorageResource), r, grpc.WaitForReady(false))
	return resp.GetBody(), err == nil
}
