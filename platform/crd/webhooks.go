package crd

import (
	"net/http"

	"go.opentelemetry.io/otel"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/egress"
)

const (
	// responseBytes and responseFactor bound the response of a conversion webhook: responseBytes, and responseFactor
	// bytes for each byte of the request. A fixed bound does not fit, because one call converts a whole list.
	responseBytes  = 16 << 20
	responseFactor = 4
)

// Webhooks configures the clients of conversion webhooks. They dial through out and limit the size of responses. config
// applies to a webhook that names the Service kubernetes.default.
func Webhooks(out egress.Selector, config *rest.Config) webhook.AuthenticationInfoResolverWrapper {
	upstream := webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, out.Upstream(), config,
		otel.GetTracerProvider())
	bound := func(c *rest.Config, err error) (*rest.Config, error) {
		if err != nil {
			return nil, err
		}
		c = rest.CopyConfig(c) // c may be config
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return egress.LimitResponses(next, responseBytes, responseFactor)
		})
		return c, nil
	}
	return func(r webhook.AuthenticationInfoResolver) webhook.AuthenticationInfoResolver {
		r = upstream(r)
		return &webhook.AuthenticationInfoResolverDelegator{
			ClientConfigForFunc: func(hostPort string) (*rest.Config, error) {
				return bound(r.ClientConfigFor(hostPort))
			},
			ClientConfigForServiceFunc: func(service, namespace string, port int) (*rest.Config, error) {
				return bound(r.ClientConfigForService(service, namespace, port))
			},
		}
	}
}
