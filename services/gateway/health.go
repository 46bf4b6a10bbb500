package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apiserver/pkg/server/healthz"

	"watershed.dev/platform/discovery"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/responsewriters"
)

const (
	// checkTimeout bounds a probe. checkTTL is how long a check caches its result, because many names share a check.
	checkTimeout = 3 * time.Second
	checkTTL     = time.Second
)

// checkName is the name of a check, as Check and the health pages show it.
type checkName string

const (
	checkDiscovery           checkName = "discovery"
	checkOpenAPI             checkName = "openapi"
	checkAggregatedDiscovery checkName = "aggregated-discovery"
	checkProxyClientCert     checkName = "proxy-client-cert"
	checkEtcd                checkName = "etcd"
	checkEtcdReadiness       checkName = "etcd-readiness"
	checkFairness            checkName = "fairness"
	checkGateways            checkName = "gateways"
	checkInFlight            checkName = "in-flight"
	checkStartHooks          checkName = "start-hooks"
	checkKMS                 checkName = "kms-providers"
	checkAuthn               checkName = "authn"
	checkAuthz               checkName = "authz"
	checkAdmission           checkName = "admission"
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
func (g *Service) checks() map[checkName]*check {
	var encryption atomic.Pointer[string] // the encryption error that the check of etcd received last
	probeEtcd := func(ctx context.Context) error {
		r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
		encryptionErr := r.GetEncryptionError()
		encryption.Store(&encryptionErr)
		return err
	}
	etcd := &check{probe: probeEtcd, timeout: g.config.EtcdHealthTimeout}
	return map[checkName]*check{
		checkDiscovery: {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errNoView
			}
			return nil
		}},
		checkOpenAPI: {probe: func(context.Context) error {
			if v := g.discovery.View(); v == nil || v.Openapi["v2"] == "" {
				return errors.New("registry has not sent the OpenAPI documents yet")
			}
			return nil
		}},
		checkAggregatedDiscovery: {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errNoView
			}
			return g.views.discoveryManager.Err()
		}},
		checkProxyClientCert: {probe: func(context.Context) error { return g.config.Aggregation.CheckCertificate() }},
		checkEtcd:            etcd,
		checkEtcdReadiness:   {probe: probeEtcd, timeout: g.config.EtcdReadyTimeout},
		checkFairness: {probe: func(context.Context) error {
			if g.flowControl == nil {
				return nil
			}
			select {
			case <-g.flowControl.Ready():
				return nil
			default:
			}
			if v := g.discovery.View(); v != nil && !servesFlowControl(v) {
				return errors.New("registry does not serve flowcontrol.apiserver.k8s.io/v1: set registry's " +
					"--runtime-config=flowcontrol.apiserver.k8s.io/v1=true, or the gateway's " +
					"--enable-priority-and-fairness=false")
			}
			return errors.New("flow control has not loaded its objects yet")
		}},
		checkGateways: {probe: func(context.Context) error {
			if g.flowControl == nil || g.heartbeat.counted() {
				return nil
			}
			return errors.New("registry has not counted this gateway yet")
		}},
		// the filter limits requests as soon as the handler chain exists
		checkInFlight:   {probe: func(context.Context) error { return nil }},
		checkStartHooks: {probe: g.hooks.probe},
		checkKMS: {probe: func(ctx context.Context) error {
			if err := etcd.get(ctx); err != nil {
				return nil // the etcd check reports it
			}
			if encryptionErr := *encryption.Load(); encryptionErr != "" { // the probe of etcd has set it
				return errors.New(encryptionErr)
			}
			return nil
		}},
		checkAuthn: {probe: func(ctx context.Context) error {
			_, err := g.deps.Authn.ReviewToken(ctx, &authnv1.ReviewTokenRequest{})
			return err
		}},
		checkAuthz: {probe: func(ctx context.Context) error {
			_, err := g.deps.Authz.Rules(ctx, &authzv1.RulesRequest{})
			return err
		}},
		checkAdmission: {probe: func(ctx context.Context) error {
			stream, err := g.deps.Admission.AdmissionRules(ctx, &admissionv1.AdmissionRulesRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}},
	}
}

// servesFlowControl reports whether registry serves the objects of flow control.
func servesFlowControl(v *discovery.View) bool {
	_, schemas := v.APIResource(flowcontrolv1.GroupName, "v1", "flowschemas", "")
	_, levels := v.APIResource(flowcontrolv1.GroupName, "v1", "prioritylevelconfigurations", "")
	return schemas && levels
}

var (
	// errNotResponded is the readiness of a service before its first response.
	errNotResponded = errors.New("no response yet")
	errNoView       = errors.New("registry has not sent the served resources yet")
	errNotListening = errors.New("it does not listen yet")
)

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
		if name != checkEtcd {
			services = append(services, healthz.NamedCheck(string(name), g.health[name].serve))
		}
	}
	// As in kube-apiserver with a KMS: the gateway is not ready without the KMS, but it is alive.
	services = append(services, healthz.NamedCheck(string(checkKMS), g.health[checkKMS].serve))
	first := []healthz.HealthChecker{healthz.PingHealthz, healthz.LogHealthz,
		healthz.NamedGroupedCheck(string(checkEtcd), string(checkEtcd), g.health[checkEtcd].serve)}
	// authn, authz and admission are the clients that kube-apiserver has on its loopback.
	loopback := []healthz.HealthChecker{healthz.NamedCheck("loopback-serving-certificate",
		func(*http.Request) error { return g.config.Server.TLS.CheckServicesCertificate(time.Now()) })}
	ready := []healthz.HealthChecker{
		healthz.NamedGroupedCheck(string(checkEtcdReadiness), string(checkEtcdReadiness),
			g.health[checkEtcdReadiness].serve),
		healthz.NamedCheck("informer-sync", g.health[checkDiscovery].serve),
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

// withOtherEtcds returns checks with the checks of the other etcds, under kube-apiserver's names and in its order. Each
// follows the same check of the main etcd.
func (g *Service) withOtherEtcds(checks []healthz.HealthChecker, logs []string) (all []healthz.HealthChecker) {
	for _, c := range checks {
		all = append(all, c)
		name, timeout := "etcd-override-%d", g.config.EtcdHealthTimeout
		switch checkName(c.Name()) {
		case checkEtcd:
		case checkEtcdReadiness:
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
