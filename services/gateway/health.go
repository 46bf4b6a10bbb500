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

// postStartHooks are the health checks of kube-apiserver's start hooks, under their names (k8s.io/apiserver/pkg/server,
// AddPostStartHook), and the check of ours that says the same: what a hook starts there runs in a service here, and the
// service is ready once it does.
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
	// probeInterval is how long to wait before a service that does not answer at the start is asked again; a question waits
	// for a replica by itself.
	probeInterval = 20 * time.Millisecond
	// checkTimeout bounds one check, and checkTTL is for how long its answer is good: many names ask the same.
	checkTimeout = 3 * time.Second
	checkTTL     = time.Second
)

// check is one of ours, asked at most once in a while.
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

// serve is the check as a page asks for it.
func (c *check) serve(r *http.Request) error { return c.get(r.Context()) }

// checks are what says whether each other service can be asked, by name.
func (g *Service) checks() map[string]*check {
	var encryption atomic.Pointer[string] // what registry said of its encryption when the check of etcd asked it
	etcd := &check{probe: func(ctx context.Context) error {
		r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
		encryptionErr := r.GetEncryptionError()
		encryption.Store(&encryptionErr)
		return err
	}}
	return map[string]*check{
		"discovery": {probe: func(context.Context) error {
			if g.discovery.View() == nil {
				return errors.New("registry has not said what is served")
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
				return errors.New("the objects of flow control have not been read")
			}
		}},
		"kms-providers": {probe: func(ctx context.Context) error {
			if err := etcd.get(ctx); err != nil {
				return nil // that is the other check's to say
			}
			if encryptionErr := *encryption.Load(); encryptionErr != "" { // etcd has been asked
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

// requiredChecks are the checks without which a gateway has nothing to answer with.
var requiredChecks = []string{"discovery", "etcd", "authn", "authz", "admission", "fairness"}

// started is a check that has come true: a start hook has run once it has, whatever comes later.
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

// installHealth serves /healthz, /livez and /readyz with kube-apiserver's names. Whether the other services can be
// asked is a matter of /healthz and /readyz: a gateway is not started again because another service is away.
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
	// As kube-apiserver has it where a KMS is used: not ready without it, but alive.
	services = append(services, healthz.NamedCheck("kms-providers", g.health["kms-providers"].serve))
	ready := []healthz.HealthChecker{
		healthz.NamedCheck("etcd-readiness", g.health["etcd"].serve),
		healthz.NamedCheck("informer-sync", g.health["etcd"].serve),
		healthz.NewShutdownHealthz(g.server.ShuttingDown),
	}
	healthz.InstallHandler(mux, slices.Concat(first, services, common)...)
	healthz.InstallLivezHandler(mux, slices.Concat(first, common)...)
	healthz.InstallReadyzHandler(mux, slices.Concat(first, services, common, ready)...)
	// Beside /readyz, since the API works without it: whether the watch tier is as far as etcd.
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

// checkTier says why the watch tier cannot be read from, or is nil.
func (g *Service) checkTier(ctx context.Context) error {
	v := g.discovery.View()
	if v == nil {
		return errors.New("registry has not said what is served")
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

// Ready is what the gateway waits for before it answers its first request. How each service is later, /readyz says.
func (g *Service) Ready() *lifecycle.Readiness { return &g.ready }

// Check says which service that the gateway needs does not answer now, or is nil.
func (g *Service) Check(ctx context.Context) error {
	for _, name := range requiredChecks {
		if err := g.health[name].get(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// errNotResponded is why a service that has not answered yet keeps the gateway from being ready.
var errNotResponded = errors.New("it has not answered yet")

// awaitRequired waits for each service that the gateway needs.
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
