package crd

import (
	"errors"
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

// Webhooks configures the clients of conversion webhooks. They dial through out and limit the size of responses.
// ownService applies to a webhook that names the API's own Service, kubernetes.default. It is nil if the process cannot
// call the gateway.
func Webhooks(out egress.Selector, ownService *rest.Config) webhook.AuthenticationInfoResolverWrapper {
	upstream := webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, out.Upstream(), ownService,
		otel.GetTracerProvider())
	bound := func(c *rest.Config, err error) (*rest.Config, error) {
		if err != nil {
			return nil, err
		}
		if c == nil {
			return nil, errors.New("a webhook at the Service kubernetes.default needs --kubeconfig, to reach the gateway")
		}
		c = rest.CopyConfig(c) // c may be ownService
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
