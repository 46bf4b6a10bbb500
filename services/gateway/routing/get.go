package routing

import (
	"context"
	"net/http"

	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// get answers one object.
func (c *call) get() {
	if body, ok := c.getFromTier(); ok {
		c.respond(&registryv1.ObjectResponse{Code: http.StatusOK, Body: body})
		return
	}
	resp, err := c.router.Objects.Get(c.req.Context(), c.getRequest())
	if err != nil {
		c.fail(rpc.FromStatus(err))
		return
	}
	c.respond(resp)
}

func (c *call) getRequest() *registryv1.GetRequest {
	return &registryv1.GetRequest{
		Resource:  c.entry.Resource,
		Namespace: c.namespace(),
		Name:      c.info.Name,
		User:      c.user,
		Query:     c.req.URL.RawQuery,
		Output:    c.out,
	}
}

// getFromTier reads one object, as it is stored, from the watch tier's bytes. Anything else is registry's to answer,
// also what the watch tier does not hold.
func (c *call) getFromTier() ([]byte, bool) {
	version, ok := c.tierVersion()
	if !ok {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(c.req.Context(), answersWithin)
	defer cancel()
	resp, err := c.router.TierGets.Get(rpc.Routed(ctx, c.entry.StoredAs), &watchfanoutv1.GetRequest{
		Query:           &watchfanoutv1.Query{Entry: c.entry, Namespace: c.namespace(), Output: c.out},
		Name:            c.info.Name,
		ResourceVersion: version,
	}, grpc.WaitForReady(false))
	return resp.GetBody(), err == nil
}

// tierVersion is the resourceVersion that a GET asks the watch tier for; ok is false where it is not the tier's to
// answer.
func (c *call) tierVersion() (version string, ok bool) {
	if c.router.TierGets == nil || c.decides() || c.entry.StoredAs == "" || c.entry.Resource.Subresource != "" ||
		!c.offers("watch") {
		return "", false
	}
	if c.out.As != nil || c.out.Pretty || !streamed(c.out.MediaType) {
		return "", false
	}
	switch c.req.URL.RawQuery {
	case "":
		return "", true
	case "resourceVersion=0":
		return "0", true
	}
	return "", false
}
