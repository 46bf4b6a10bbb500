package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/server/healthz"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// startHooks maps the checks of kube-apiserver's start hooks (k8s.io/apiserver/pkg/server, AddPostStartHook) to the
// check of the same part of Watershed, or of the nearest part. docs/operators/troubleshooting.md has the same table.
// The hooks of registryHooks, and the hooks that discovery names (withHooks), are not in it.
var startHooks = map[string]checkName{
	// admission sends its rules once its plugins have read their policies.
	"poststarthook/start-apiserver-admission-initializer": checkAdmission,
	// The registry sends the served resources once its informers of built-in objects, CRDs and APIServices have synced.
	"poststarthook/generic-apiserver-start-informers":  checkDiscovery,
	"poststarthook/start-apiextensions-informers":      checkDiscovery,
	"poststarthook/crd-informer-synced":                checkDiscovery,
	"poststarthook/start-kube-aggregator-informers":    checkDiscovery,
	"poststarthook/apiservice-registration-controller": checkDiscovery,
	// The storages have no watch cache in front, so they are ready if etcd is.
	"poststarthook/storage-readiness":                     checkEtcd,
	"poststarthook/priority-and-fairness-config-consumer": checkFairness,
	"poststarthook/priority-and-fairness-filter":          checkFairness,
	"poststarthook/max-in-flight-filter":                  checkInFlight,
	// Flow control estimates a list by the size of its last response. It counts no objects.
	"poststarthook/storage-object-count-tracker-hook": checkFairness,
	// There is no proxy between versions. The gateway registers at the registry, which counts the gateways.
	"poststarthook/peer-endpoint-reconciler-controller": checkGateways,
	"poststarthook/aggregator-reload-proxy-client-cert": checkProxyClientCert,
	"poststarthook/apiservice-discovery-controller":     checkAggregatedDiscovery,
	"poststarthook/apiservice-openapi-controller":       checkOpenAPI,
	"poststarthook/apiservice-openapiv3-controller":     checkOpenAPI,
}

// registryHooks are the start hooks that the elected registry runs, by the names of Discovery.StartHooks.
var registryHooks = []string{
	"start-system-namespaces-controller",
	"start-cluster-authentication-info-controller",
	"start-kube-apiserver-identity-lease-controller",
	"start-kube-apiserver-identity-lease-garbage-collector",
	"start-kube-apiserver-coordinated-leader-election-controller",
	"start-legacy-token-tracking-controller",
	"start-service-ip-repair-controllers",
	"rbac/bootstrap-roles",
	"scheduling/bootstrap-system-priority-classes",
	"priority-and-fairness-config-producer",
	"bootstrap-controller",
	"start-kubernetes-service-cidr-controller",
	"start-apiextensions-controllers",
	"apiservice-status-local-available-controller",
	"apiservice-status-remote-available-controller",
	"kube-apiserver-autoregistration",
	autoregistered,
}

// gatedHooks maps the checks of start hooks that depend on a feature gate to the gate.
var gatedHooks = map[string]featuregate.Feature{
	"poststarthook/start-kube-apiserver-identity-lease-controller":              features.APIServerIdentity,
	"poststarthook/start-kube-apiserver-identity-lease-garbage-collector":       features.APIServerIdentity,
	"poststarthook/start-kube-apiserver-coordinated-leader-election-controller": features.CoordinatedLeaderElection,
	"poststarthook/peer-endpoint-reconciler-controller":                         features.UnknownVersionInteroperabilityProxy,
	"poststarthook/storage-readiness":                                           features.WatchCacheInitializationPostStartHook,
}

// gateEnabled returns false if the check of a start hook depends on a disabled feature gate.
func gateEnabled(check string) bool {
	gate, ok := gatedHooks[check]
	return !ok || utilfeature.DefaultFeatureGate.Enabled(gate)
}

// autoregistered is the hook whose check has no prefix in kube-apiserver.
const autoregistered = "autoregister-completion"

// registryHooksProgress is the progress of registryHooks.
type registryHooksProgress struct {
	registry registryv1.DiscoveryClient
	// pending are the pending hooks of the last response, or nil.
	pending  atomic.Pointer[[]string]
	complete atomic.Bool
}

// probe returns nil once all hooks have completed.
func (h *registryHooksProgress) probe(ctx context.Context) error {
	if h.complete.Load() {
		return nil
	}
	r, err := h.registry.StartHooks(ctx, &registryv1.StartHooksRequest{})
	switch {
	case err != nil:
		return err
	case !r.Known:
		return errors.New("no elected registry has published its progress yet")
	case len(r.Pending) > 0:
		h.pending.Store(&r.Pending)
		return fmt.Errorf("pending: %s", strings.Join(r.Pending, ", "))
	}
	h.complete.Store(true)
	return nil
}

// completed reports whether the hook has completed.
func (h *registryHooksProgress) completed(name string) bool {
	pending := h.pending.Load()
	return h.complete.Load() || pending != nil && !slices.Contains(*pending, name)
}

// hookCheckers returns the checkers of the start hooks that kube-apiserver would have with this configuration.
func (g *Service) hookCheckers() (all []healthz.HealthChecker) {
	for name, checked := range startHooks {
		if checked == checkProxyClientCert && g.config.Aggregation.CertFile == "" ||
			checked == checkInFlight && g.config.FlowControl.Enabled ||
			strings.Contains(name, "/priority-and-fairness-") && !g.config.FlowControl.Enabled || !gateEnabled(name) {
			continue
		}
		all = append(all, healthz.NamedCheck(name, g.health[checked].started()))
	}
	for _, name := range registryHooks {
		shown := "poststarthook/" + name
		if name == autoregistered {
			shown = name
		}
		if !gateEnabled(shown) {
			continue
		}
		all = append(all, healthz.NamedCheck(shown, func(r *http.Request) error {
			if g.hooks.completed(name) {
				return nil
			}
			if err := g.health[checkStartHooks].serve(r); err != nil && !g.hooks.completed(name) {
				return err
			}
			return nil
		}))
	}
	slices.SortFunc(all, func(a, b healthz.HealthChecker) int { return strings.Compare(a.Name(), b.Name()) })
	return all
}

// withHooks returns checks with the checks of start hooks that have run. As in kube-apiserver, the hooks are in the
// order of their names. A registry of a later release may name a hook that checks has.
func withHooks(checks []healthz.HealthChecker, hooks []string) []healthz.HealthChecker {
	for _, h := range hooks {
		name := "poststarthook/" + h
		if slices.ContainsFunc(checks, func(c healthz.HealthChecker) bool { return c.Name() == name }) {
			continue
		}
		last := -1
		for i, c := range checks {
			if strings.HasPrefix(c.Name(), "poststarthook/") && c.Name() < name {
				last = i
			}
		}
		checks = slices.Insert(checks, last+1, healthz.NamedCheck(name, func(*http.Request) error { return nil }))
	}
	return checks
}
