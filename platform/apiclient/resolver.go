package apiclient

import (
	"net/url"

	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/client-go/informers"
)

// ServiceResolver resolves the service of a webhook or of an APIService
// (k8s.io/apiserver/pkg/util/webhook.ServiceResolver).
type ServiceResolver func(namespace, name string, port int32) (*url.URL, error)

// ResolveEndpoint implements webhook.ServiceResolver.
func (r ServiceResolver) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	return r(namespace, name, port)
}

// NewServiceResolver returns a resolver that reads f. It resolves to a ready endpoint of the service if endpoints is
// set (--enable-aggregator-routing), and to the cluster IP otherwise.
func NewServiceResolver(f informers.SharedInformerFactory, endpoints bool) (ServiceResolver, error) {
	services := f.Core().V1().Services().Lister()
	if !endpoints {
		return func(namespace, name string, port int32) (*url.URL, error) {
			return proxy.ResolveCluster(services, namespace, name, port)
		}, nil
	}
	slices, err := proxy.NewEndpointSliceIndexerGetter(f.Discovery().V1().EndpointSlices())
	return func(namespace, name string, port int32) (*url.URL, error) {
		return proxy.ResolveEndpoint(services, slices, namespace, name, port)
	}, err
}
