package admission

import (
	"context"
	"time"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"
)

// mapperPeriod is how often what discovery said is forgotten, as kube-apiserver does
// (k8s.io/apiserver/pkg/server/options/admission.go, start-apiserver-admission-initializer).
const mapperPeriod = 30 * time.Second

// mapper tells plugins which resource a kind is: a policy's parameters, an owner. It knows of definitions that come
// later.
type mapper struct {
	*restmapper.DeferredDiscoveryRESTMapper
	changed chan struct{}
}

func newMapper(d discovery.DiscoveryInterface) *mapper {
	return &mapper{restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(d)), make(chan struct{}, 1)}
}

// Initialize implements admission.PluginInitializer. It comes after upstream's, whose mapper nobody refreshes here.
func (m *mapper) Initialize(plugin admission.Interface) {
	if w, ok := plugin.(initializer.WantsRESTMapper); ok {
		w.SetRESTMapper(m)
	}
}

// invalidate has what discovery said forgotten soon: a definition has changed.
func (m *mapper) invalidate() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

func (m *mapper) run(ctx context.Context) {
	tick := time.NewTicker(mapperPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.changed:
		case <-tick.C:
		}
		m.Reset()
		select { // many change at once
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}
