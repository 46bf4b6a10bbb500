package gateway

import (
	"sync"

	apidiscovery "watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/discovery"
	"watershed.dev/services/gateway/openapi"
)

// views publishes what is served, here and by aggregated servers, to discovery and OpenAPI.
type views struct {
	remotes   *aggregation.Proxy
	learner   *aggregation.Learner
	discovery *discovery.Handler
	openapi   *openapi.Handler

	// mu lets one view be published after the other.
	mu     sync.Mutex
	latest *apidiscovery.View
}

func newViews(address string, registry registryv1.DiscoveryClient, remotes *aggregation.Proxy) *views {
	v := &views{remotes: remotes}
	v.learner = aggregation.NewLearner(remotes, v.learned)
	v.discovery = &discovery.Handler{Address: address, Aggregated: v.learner}
	v.openapi = openapi.New(registry, v.learner)
	return v
}

// publish makes a view the one that clients are told of.
func (v *views) publish(view *apidiscovery.View) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.remotes.Set(view) {
		v.learner.Wake()
	}
	v.latest = view
	v.tell()
}

// learned tells of the latest view again: what an aggregated server serves has changed.
func (v *views) learned() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.latest != nil {
		v.tell()
	}
}

func (v *views) tell() {
	v.discovery.Set(v.latest)
	v.openapi.Set(v.latest)
}
