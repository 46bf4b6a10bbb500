package apiclient

import (
	"net/http"

	"k8s.io/client-go/rest"
)

// OwnService returns the configuration of the clients of webhooks at the API's own Service, kubernetes.default. Their
// requests reach the gateway of c with c's credentials. The address and the certificates of a webhook do not matter.
func (c *Conn) OwnService() (*rest.Config, error) {
	gateway, _, err := rest.DefaultServerUrlFor(c.Config)
	if err != nil {
		return nil, err
	}
	gateway = gateway.JoinPath("/") // the joined paths are absolute
	rt, err := rest.TransportFor(c.Config)
	if err != nil {
		return nil, err
	}
	// A custom Transport instead of the wrapper would exclude the webhook's CA bundle, which client-go adds.
	return &rest.Config{WrapTransport: func(http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			req = req.Clone(req.Context())
			u := gateway.JoinPath(req.URL.EscapedPath())
			u.RawQuery = req.URL.RawQuery
			req.URL, req.Host = u, ""
			return rt.RoundTrip(req)
		})
	}}, nil
}
