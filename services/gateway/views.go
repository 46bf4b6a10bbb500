package gateway

import (
	"sync"

	apidiscovery "watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/discovery"
	"watershed.dev/services/gateway/openapi"
)

// views publishes the served resources, of this system and of aggregated servers, to discovery and OpenAPI.
type views struct {
	apiServices      *aggregation.Proxy
	discoveryManager *aggregation.DiscoveryManager
	discovery        *discovery.Handler
	openapi          *openapi.Handler

	// mu orders the publications of views.
	mu     sync.Mutex
	latest *apidiscovery.View
}

func newViews(address string, registry registryv1.DiscoveryClient, apiServices *aggregation.Proxy) *views {
	v := &views{apiServices: apiServices}
	v.discoveryManager = aggregation.NewDiscoveryManager(apiServices, v.refreshed)
	v.discovery = &discovery.Handler{Address: address, Aggregated: v.discoveryManager}
	v.openapi = openapi.New(registry, v.discoveryManager, apiServices)
	return v
}

// publish makes view the view that clients receive.
func (v *views) publish(view *apidiscovery.View) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.apiServices.Set(view) {
		v.discoveryManager.RefreshSoon()
	}
	v.latest = view
	v.notify()
}

// refreshed publishes the latest view again, because discovery of an aggregated server has changed.
func (v *views) refreshed() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.latest != nil {
		v.notify()
	}
}

func (v *views) notify() {
	v.discovery.Set(v.latest)
	v.openapi.Set(v.latest)
}
