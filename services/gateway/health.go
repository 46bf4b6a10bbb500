package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/server/healthz"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"

	"watershed.dev/platform/lifecycle"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/responsewriters"
)

// startHooks maps the checks of kube-apiserver's start hooks (k8s.io/apiserver/pkg/server, AddPostStartHook) to the
// check of the same part of Watershed, or of the nearest part. docs/operators/troubleshooting.md has the same table.
// The hooks of registryHooks, and the hooks that discovery names (withHooks), are not in it.
var startHooks = map[string]string{
	// admission sends its rules once its plugins have read their policies.
	"poststarthook/start-apiserver-admission-initializer": "admission",
	// The registry sends the served resources once its informers of built-in objects, CRDs and APIServices have synced.
	"poststarthook/generic-apiserver-start-informers":  "discovery",
	"poststarthook/start-apiextensions-informers":      "discovery",
	"poststarthook/crd-informer-synced":                "discovery",
	"poststarthook/start-kube-aggregator-informers":    "discovery",
	"poststarthook/apiservice-registration-controller": "discovery",
	// The storages have no watch cache in front, so they are ready if etcd is.
	"poststarthook/storage-readiness":                     "etcd",
	"poststarthook/priority-and-fairness-config-consumer": "fairness",
	"poststarthook/priority-and-fairness-filter":          "fairness",
	"poststarthook/max-in-flight-filter":                  "in-flight",
	// Flow control estimates a list by the size of its last response. It counts no objects.
	"poststarthook/storage-object-count-tracker-hook": "fairness",
	// There is no proxy between versions. The gateway registers at the registry, which counts the gateways.
	"poststarthook/peer-endpoint-reconciler-controller": "gateways",
	"poststarthook/aggregator-reload-proxy-client-cert": "proxy-client-cert",
	"poststarthook/apiservice-discovery-controller":     "aggregated-discovery",
	"poststarthook/apiservice-openapi-controller":       "openapi",
	"poststarthook/apiservice-openapiv3-controller":     "openapi",
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

const (
	// probeInterval is the pause before the gateway probes a service again during the start. Each probe also waits for
	// a replica.
	probeInterval = 20 * time.Millisecond
	// checkTimeout bounds a probe. checkTTL is how long a check caches its result, because many names share a check.
	checkTimeout = 3 * time.Second
	checkTTL     = time.Second
	// fairnessWait is how long a gateway that can serve, but for flow control, stays away from a shared port.
	fairnessWait = 2 * time.Second
)

// check is a health check of this gateway. It probes at most once for each checkTTL.
type check struct {
	probe func(context.Context) error
	// timeout bounds a probe. 0: checkTimeout.
	timeout time.Duration

	mu        sync.Mutex
	checkedAt time.Time
	err       error
}

func (c *check) get(ctx context.Context) error {
	return c.getNewer(context.WithoutCancel(ctx), checkTTL)
}

// getNewer returns a result that is at most maxAge old.
func (c *check) getNewer(ctx context.Context, maxAge time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checkedAt) > maxAge {
		ctx, cancel := context.WithTimeout(ctx, cmp.Or(c.timeout, checkTimeout))
		c.err = c.probe(ctx)
		cancel()
		c.checkedAt = time.Now()
	}
	return c.err
}

// serve is the check as a healthz.HealthChecker's function.
func (c *check) serve(r *http.Request) error { return c.get(r.Context()) }

// checks returns the checks by name.
func (g *Service) checks() map[string]*check {
	var encryption atomic.Pointer[string] // the encryption error that the check of etcd received last
	probeEtcd := func(ctx context.Context) error {
		r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
		encryptionErr := r.GetEncryptionError()
		encryption.Store(&encryptionErr)
		return err
	}
	etcd := &check{probe: probeEtcd, timeout: g.config.EtcdHealthTimeout}
	return map[string]*check{
		"discovery": {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errNoView
			}
			return nil
		}},
		"openapi": {probe: func(context.Context) error {
			if v := g.discovery.View(); v == nil || v.Openapi["v2"] == "" {
				return errors.New("registry has not sent the OpenAPI documents yet")
			}
			return nil
		}},
		"aggregated-discovery": {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errNoView
			}
			return g.views.discoveryManager.Err()
		}},
		"proxy-client-cert": {probe: func(context.Context) error { return g.config.Aggregation.CheckCertificate() }},
		"etcd":              etcd,
		"etcd-readiness":    {probe: probeEtcd, timeout: g.config.EtcdReadyTimeout},
		"fairness": {probe: func(context.Context) error {
			if g.flowControl == nil {
				return nil
			}
			select {
			case <-g.flowControl.Ready():
				return nil
			default:
				return errors.New("flow control has not loaded its objects yet")
			}
		}},
		"gateways": {probe: func(context.Context) error {
			if g.flowControl == nil || g.heartbeat.counted() {
				return nil
			}
			return errors.New("registry has not counted this gateway yet")
		}},
		// the filter limits requests as soon as the handler chain exists
		"in-flight":   {probe: func(context.Context) error { return nil }},
		"start-hooks": {probe: g.hooks.probe},
		"kms-providers": {probe: func(ctx context.Context) error {
			if err := etcd.get(ctx); err != nil {
				return nil // the etcd check reports it
			}
			if encryptionErr := *encryption.Load(); encryptionErr != "" { // the probe of etcd has set it
				return errors.New(encryptionErr)
			}
			return nil
		}},
		"authn": {probe: func(ctx context.Context) error {
			_, err := g.deps.Authn.ReviewToken(ctx, &authnv1.ReviewTokenRequest{})
			return err
		}},
		"authz": {probe: func(ctx context.Context) error {
			_, err := g.deps.Authz.Rules(ctx, &authzv1.RulesRequest{})
			return err
		}},
		"admission": {probe: func(ctx context.Context) error {
			stream, err := g.deps.Admission.AdmissionRules(ctx, &admissionv1.AdmissionRulesRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}},
	}
}

// requiredChecks are the checks that must succeed once before the gateway is ready. Check and /readyz have them too.
var requiredChecks = []string{"discovery", "etcd", "authn", "authz", "admission", "fairness"}

// readThroughGateways are the services that read the cluster through a gateway. Their checks fail until a gateway
// serves, so a gateway must serve before these checks succeed.
var readThroughGateways = []string{"authn", "authz", "admission"}

var (
	// errNotResponded is the readiness of a service before its first response.
	errNotResponded = errors.New("no response yet")
	errNoView       = errors.New("registry has not sent the served resources yet")
	errNotListening = errors.New("it does not listen yet")
)

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
	case status.Code(err) == codes.Unimplemented: // a registry of an older release
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
		if checked == "proxy-client-cert" && g.config.Aggregation.CertFile == "" ||
			checked == "in-flight" && g.config.FlowControl.Enabled ||
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
			if err := g.health["start-hooks"].serve(r); err != nil && !g.hooks.completed(name) {
				return err
			}
			return nil
		}))
	}
	slices.SortFunc(all, func(a, b healthz.HealthChecker) int { return strings.Compare(a.Name(), b.Name()) })
	return all
}

// afterGracePeriod returns checkers that succeed without a check for a period from now.
func afterGracePeriod(checks []healthz.HealthChecker, period time.Duration) (delayed []healthz.HealthChecker) {
	end := time.Now().Add(period)
	for _, c := range checks {
		delayed = append(delayed, healthz.NamedCheck(c.Name(), func(r *http.Request) error {
			if time.Now().Before(end) {
				return nil
			}
			return c.Check(r)
		}))
	}
	return delayed
}

// started returns a checker's function that stays successful after the first success of c, because a start hook runs
// once.
func (c *check) started() func(*http.Request) error {
	var done atomic.Bool
	return func(r *http.Request) error {
		if done.Load() {
			return nil
		}
		err := c.get(r.Context())
		done.Store(err == nil)
		return err
	}
}

// installHealth serves /healthz, /livez and /readyz under kube-apiserver's names. It returns the paths of the checks,
// except the checks that discovery names.
// /healthz and /readyz include the other services. /livez includes only etcd, the certificate for services and the
// start hooks, because a restart of the gateway does not help if another service is unavailable.
func (g *Service) installHealth(mux *http.ServeMux) (paths []string) {
	var services []healthz.HealthChecker
	for _, name := range requiredChecks {
		if name != "etcd" {
			services = append(services, healthz.NamedCheck(name, g.health[name].serve))
		}
	}
	// As in kube-apiserver with a KMS: the gateway is not ready without the KMS, but it is alive.
	services = append(services, healthz.NamedCheck("kms-providers", g.health["kms-providers"].serve))
	first := []healthz.HealthChecker{healthz.PingHealthz, healthz.LogHealthz,
		healthz.NamedGroupedCheck("etcd", "etcd", g.health["etcd"].serve)}
	// authn, authz and admission are the clients that kube-apiserver has on its loopback.
	loopback := []healthz.HealthChecker{healthz.NamedCheck("loopback-serving-certificate",
		func(*http.Request) error { return g.config.Server.TLS.CheckServicesCertificate(time.Now()) })}
	ready := []healthz.HealthChecker{
		healthz.NamedGroupedCheck("etcd-readiness", "etcd-readiness", g.health["etcd-readiness"].serve),
		healthz.NamedCheck("informer-sync", g.health["discovery"].serve),
		healthz.NewShutdownHealthz(g.server.ShuttingDown),
	}
	hooks := g.hookCheckers()
	for _, page := range []struct {
		path   string
		checks []healthz.HealthChecker
	}{
		{"/healthz", slices.Concat(first, loopback, services, hooks)},
		{"/livez", slices.Concat(first, loopback, afterGracePeriod(hooks, g.config.LivezGracePeriod))},
		{"/readyz", slices.Concat(first, services, hooks, ready)},
	} {
		served := g.healthPage(page.path, page.checks)
		mux.Handle(page.path, served)
		mux.Handle(page.path+"/", served)
		paths = append(paths, page.path)
		for _, c := range page.checks {
			paths = append(paths, page.path+"/"+c.Name())
		}
	}
	// The watch tier has its own page, because the API works without it. The page reports whether a replica can serve a
	// list.
	mux.HandleFunc("/readyz/watch-tier", func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithTimeout(req.Context(), checkTimeout)
		defer cancel()
		if err := g.checkTier(ctx); err != nil {
			http.Error(w, "internal server error: "+err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write([]byte("ok"))
	})
	return append(paths, "/readyz/watch-tier")
}

// healthPage serves a health page: checks, and the checks of the other etcds and of the start hooks that discovery
// names.
func (g *Service) healthPage(path string, checks []healthz.HealthChecker) http.Handler {
	var mu sync.Mutex
	var logs, hooks []string
	var current *http.ServeMux
	page := func() http.Handler {
		mu.Lock()
		defer mu.Unlock()
		v := g.discovery.View()
		if current == nil || v != nil && (!slices.Equal(v.Logs, logs) || !slices.Equal(v.StartHooks, hooks)) {
			if v != nil {
				logs, hooks = v.Logs, v.StartHooks
			}
			current = http.NewServeMux()
			healthz.InstallPathHandler(current, path, withHooks(g.withOtherEtcds(checks, logs), hooks)...)
			current.HandleFunc("/", responsewriters.NotFound)
		}
		return current
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { page().ServeHTTP(w, req) })
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

// withOtherEtcds returns checks with the checks of the other etcds, under kube-apiserver's names and in its order. Each
// follows the same check of the main etcd.
func (g *Service) withOtherEtcds(checks []healthz.HealthChecker, logs []string) (all []healthz.HealthChecker) {
	for _, c := range checks {
		all = append(all, c)
		name, timeout := "etcd-override-%d", g.config.EtcdHealthTimeout
		switch c.Name() {
		case "etcd":
		case "etcd-readiness":
			name, timeout = "etcd-override-readiness-%d", g.config.EtcdReadyTimeout
		default:
			continue
		}
		for i, log := range logs {
			probe := func(ctx context.Context) error {
				_, err := g.revision(ctx, log)
				return err
			}
			other := &check{probe: probe, timeout: timeout}
			all = append(all, healthz.NamedGroupedCheck(fmt.Sprintf(name, i), c.Name(), other.serve))
		}
	}
	return all
}

// checkTier returns why the watch tier cannot serve a list of namespaces, or nil.
func (g *Service) checkTier(ctx context.Context) error {
	v := g.discovery.View()
	if v == nil {
		return errNoView
	}
	entry, ok := v.APIResource("", "v1", "namespaces", "")
	if !ok {
		return errors.New("namespaces are not served")
	}
	stream, err := g.deps.Watch.List(tierContext(ctx), &watchfanoutv1.ListRequest{
		Query: &watchfanoutv1.Query{
			Resource: entry.Resource,
			Output:   &registryv1.Output{MediaType: "application/json"},
		},
		Limit: 1,
	})
	if err == nil {
		_, err = stream.Recv()
	}
	return err
}

// Ready returns the readiness that must hold before the gateway serves its first request. Later states of the services
// are on /readyz.
func (g *Service) Ready() *lifecycle.Readiness { return &g.ready }

// Check returns the first required service that does not respond now, or nil.
func (g *Service) Check(ctx context.Context) error {
	for _, name := range requiredChecks {
		if err := g.health[name].get(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// awaitStart probes each check of the start until it succeeds once, or until ctx ends. A probe waits for a replica.
//
// awaitStart closes joinable after the gateway's own checks have succeeded and each service of readThroughGateways has
// been probed. It waits for flow control for fairnessWait at most, because flow control may wait for the port: its
// controller writes the status of FlowSchemas. Each write waits for admission's plugins, which read the cluster through
// a gateway.
func (g *Service) awaitStart(ctx context.Context) {
	var all, own sync.WaitGroup
	fair := make(chan struct{})
	for _, name := range startChecks() {
		done := func() {}
		switch {
		case name == "fairness":
			done = func() { close(fair) }
		case slices.Contains(requiredChecks, name):
			own.Add(1)
			done = sync.OnceFunc(own.Done)
		}
		all.Go(func() {
			defer done()
			for ctx.Err() == nil {
				err := g.health[name].getNewer(ctx, 0)
				if slices.Contains(readThroughGateways, name) {
					done()
				}
				if g.ready.Set(name, err); err == nil {
					return
				}
				select {
				case <-ctx.Done():
				case <-time.After(probeInterval):
				}
			}
		})
	}
	own.Wait()
	select {
	case <-fair:
	case <-time.After(fairnessWait):
	}
	close(g.joinable)
	all.Wait()
	if ctx.Err() == nil {
		close(g.started)
	}
}

// startChecks returns the checks that must succeed once before the gateway is ready: the required checks and the checks
// of the start hooks.
func startChecks() []string {
	names := slices.Concat(requiredChecks, []string{"start-hooks"}, slices.Collect(maps.Values(startHooks)))
	slices.Sort(names)
	return slices.Compact(names)
}
