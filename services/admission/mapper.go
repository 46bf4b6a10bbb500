package admission

import (
	"context"
	"time"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"

	"watershed.dev/platform/lifecycle"
)

// mapperPeriod is how often the cached discovery is reset, as in kube-apiserver
// (k8s.io/apiserver/pkg/server/options/admission.go, start-apiserver-admission-initializer).
const mapperPeriod = 30 * time.Second

// mapper maps kinds to resources for plugins: a policy's parameters, an owner. It follows changes of CRDs.
type mapper struct {
	*restmapper.DeferredDiscoveryRESTMapper
	changed chan struct{}
}

func newMapper(d discovery.DiscoveryInterface) *mapper {
	return &mapper{restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(d)), make(chan struct{}, 1)}
}

// Initialize implements admission.PluginInitializer. It runs after upstream's initializer, whose mapper is never reset
// here.
func (m *mapper) Initialize(plugin admission.Interface) {
	if w, ok := plugin.(initializer.WantsRESTMapper); ok {
		w.SetRESTMapper(m)
	}
}

// stopSignal gives plugins the channel that ends their goroutines. The informers of policies' parameters are among
// them, and the factory of informers waits for these. Upstream's initializer gives a channel that only a running
// GenericAPIServer closes.
type stopSignal chan struct{}

// Initialize implements admission.PluginInitializer. It runs after upstream's initializer.
func (s stopSignal) Initialize(plugin admission.Interface) {
	if w, ok := plugin.(initializer.WantsDrainedNotification); ok {
		w.SetDrainedNotification(s)
	}
}

// invalidate schedules a reset, because a CRD has changed.
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
		if lifecycle.Sleep(ctx, time.Second) != nil { // CRDs often change together
			return
		}
	}
}
