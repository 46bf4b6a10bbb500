package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/server/healthz"

	"watershed.dev/platform/lifecycle"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// postStartHooks maps the health checks of kube-apiserver's start hooks (k8s.io/apiserver/pkg/server, AddPostStartHook)
// to this gateway's checks. The task of a start hook runs in another service here, and that service is ready once the
// task runs.
var postStartHooks = map[string]string{
	"poststarthook/start-apiserver-admission-initializer":         "admission",
	"poststarthook/generic-apiserver-start-informers":             "etcd",
	"poststarthook/storage-readiness":                             "etcd",
	"poststarthook/start-apiextensions-informers":                 "etcd",
	"poststarthook/start-apiextensions-controllers":               "etcd",
	"poststarthook/crd-informer-synced":                           "etcd",
	"poststarthook/bootstrap-controller":                          "etcd",
	"poststarthook/start-system-namespaces-controller":            "etcd",
	"poststarthook/start-kubernetes-service-cidr-controller":      "etcd",
	"poststarthook/start-service-ip-repair-controllers":           "etcd",
	"poststarthook/start-legacy-token-tracking-controller":        "etcd",
	"poststarthook/priority-and-fairness-config-consumer":         "fairness",
	"poststarthook/priority-and-fairness-filter":                  "fairness",
	"poststarthook/priority-and-fairness-config-producer":         "etcd",
	"poststarthook/rbac/bootstrap-roles":                          "authz",
	"poststarthook/scheduling/bootstrap-system-priority-classes":  "etcd",
	"poststarthook/start-cluster-authentication-info-controller":  "etcd",
	"poststarthook/start-kube-aggregator-informers":               "etcd",
	"poststarthook/apiservice-registration-controller":            "discovery",
	"poststarthook/apiservice-discovery-controller":               "discovery",
	"poststarthook/apiservice-status-local-available-controller":  "etcd",
	"poststarthook/apiservice-status-remote-available-controller": "etcd",
	"poststarthook/kube-apiserver-autoregistration":               "discovery",
	"poststarthook/apiservice-openapi-controller":                 "discovery",
	"poststarthook/apiservice-openapiv3-controller":               "discovery",
	"autoregister-completion":                                     "discovery",
}

const (
	// probeInterval is the pause before the gateway probes a service again during the start. Each probe also waits for
	// a replica.
	probeInterval = 20 * time.Millisecond
	// checkTimeout bounds a probe. checkTTL is how long a check caches its result, because many names share a check.
	checkTimeout = 3 * time.Second
	checkTTL     = time.Second
)

// check is one health check of this gateway. It probes at most once for each checkTTL.
type check struct {
	probe func(context.Context) error

	mu        sync.Mutex
	checkedAt time.Time
	err       error
}

func (c *check) get(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checkedAt) > checkTTL {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), checkTimeout)
		c.err = c.probe(ctx)
		cancel()
		c.checkedAt = time.Now()
	}
	return c.err
}

// serve is the check as a healthz.HealthChecker's function.
func (c *check) serve(r *http.Request) error { return c.get(r.Context()) }

// checks returns the checks of the other services, by name.
func (g *Service) checks() map[string]*check {
	var encryption atomic.Pointer[string] // the encryption error that the check of etcd received last
	etcd := &check{probe: func(ctx context.Context) error {
		r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
		encryptionErr := r.GetEncryptionError()
		encryption.Store(&encryptionErr)
		return err
	}}
	return map[string]*check{
		"discovery": {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errors.New("registry has not sent the served resources yet")
			}
			return nil
		}},
		"etcd": etcd,
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

// requiredChecks are the checks that must succeed once before the gateway is ready.
var requiredChecks = []string{"discovery", "etcd", "authn", "authz", "admission", "fairness"}

// started returns a checker that stays successful after the first success of c, because a start hook runs once.
func (c *check) started() healthz.HealthChecker {
	var done atomic.Bool
	return healthz.NamedCheck("", func(r *http.Request) error {
		if done.Load() {
			return nil
		}
		err := c.get(r.Context())
		done.Store(err == nil)
		return err
	})
}

// installHealth serves /healthz, /livez and /readyz under kube-apiserver's names. /healthz and /readyz include the
// other services. /livez includes only etcd and the start hooks, because a restart of the gateway does not help if
// another service is unavailable.
func (g *Service) installHealth(mux *http.ServeMux) {
	var common, services []healthz.HealthChecker
	for _, name := range requiredChecks {
		if name != "etcd" {
			services = append(services, healthz.NamedCheck(name, g.health[name].serve))
		}
	}
	names := make([]string, 0, len(postStartHooks))
	for name := range postStartHooks {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		common = append(common, healthz.NamedCheck(name, g.health[postStartHooks[name]].started().Check))
	}
	first := []healthz.HealthChecker{healthz.PingHealthz, healthz.LogHealthz,
		healthz.NamedCheck("etcd", g.health["etcd"].serve)}
	// As in kube-apiserver with a KMS: the gateway is not ready without the KMS, but it is alive.
	services = append(services, healthz.NamedCheck("kms-providers", g.health["kms-providers"].serve))
	ready := []healthz.HealthChecker{
		healthz.NamedCheck("etcd-readiness", g.health["etcd"].serve),
		healthz.NamedCheck("informer-sync", g.health["etcd"].serve),
		healthz.NewShutdownHealthz(g.server.ShuttingDown),
	}
	healthz.InstallHandler(mux, slices.Concat(first, services, common)...)
	healthz.InstallLivezHandler(mux, slices.Concat(first, common)...)
	healthz.InstallReadyzHandler(mux, slices.Concat(first, services, common, ready)...)
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
}

// checkTier returns why the watch tier cannot serve a list of namespaces, or nil.
func (g *Service) checkTier(ctx context.Context) error {
	v := g.discovery.View()
	if v == nil {
		return errors.New("registry has not sent the served resources yet")
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

// errNotResponded is the readiness of a service before its first response.
var errNotResponded = errors.New("no response yet")

// awaitRequired probes each required service until it succeeds once, or until ctx ends.
func (g *Service) awaitRequired(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, name := range requiredChecks {
		wg.Go(func() {
			for ctx.Err() == nil {
				probeCtx, cancel := context.WithTimeout(ctx, checkTimeout)
				err := g.health[name].probe(probeCtx)
				cancel()
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
}
