package routing

import (
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/warning"
)

// connect gets the backend's URL from registry and connects the client to it.
func (c *requestContext) connect() {
	r := c.writeRequest()
	if c.apiResource.ConnectSubpath {
		r.Subpath = c.subpath()
	}
	m, err := c.callWithCallbacks(r, c.router.Objects.Connect)
	if err != nil {
		c.fail(err)
		return
	}
	for _, t := range m.GetConnection().GetWarnings() {
		warning.AddWarning(c.req.Context(), "", t)
	}
	metrics.RecordLongRunning(c.req, c.info, metrics.APIServerComponent, func() {
		c.router.Proxy.Serve(c.w, c.req, c.info.Name, m.GetConnection(), c.fail)
	})
}
