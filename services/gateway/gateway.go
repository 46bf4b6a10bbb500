package gateway

import (
	"context"
	"net/http"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/authentication/user"
	handlersmetrics "k8s.io/apiserver/pkg/endpoints/handlers/metrics"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	flowcontrolmetrics "k8s.io/apiserver/pkg/util/flowcontrol/metrics"
	proxymetrics "k8s.io/apiserver/pkg/util/proxy/metrics"
	"k8s.io/client-go/rest"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*
	_ "k8s.io/component-base/metrics/prometheus/version"    // kubernetes_build_info

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/loopback"
	"watershed.dev/platform/process"
	"watershed.dev/platform/reload"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/console"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/flowcontrol"
	"watershed.dev/services/gateway/proxy"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/server"
	"watershed.dev/services/gateway/turns"
	"watershed.dev/services/gateway/watch"
)

// Deps are the clients for the other services.
type Deps struct {
	Authn         authnv1.AuthnClient
	Authz         authzv1.AuthzClient
	Admission     admissionv1.AdmissionClient
	Objects       registryv1.ObjectsClient
	Discovery     registryv1.DiscoveryClient
	Source        registryv1.SourceClient
	Watch         watchfanoutv1.WatchClient
	InternalWatch watchfanoutv1.InternalWatchClient
	// Flags are the flags of the process, for /flagz.
	Flags *pflag.FlagSet
	// Report returns the report of this process, and Reports the reports of the other services' processes.
	Report  func(context.Context, process.Kind) *process.Report
	Reports func(context.Context, process.Kind) []*process.Report
}

const (
	// maxFallbackLists is the number of lists that the registry answers for a gateway and an etcd at a time. Each list
	// is read from etcd, decoded, encoded, and buffered for all requests that share it.
	maxFallbackLists = 4
	// maxOwnFallbackLists is how many of them an owner has at most, except services, nodes and users of system:masters.
	maxOwnFallbackLists = 3
	// maxFallbackQueue is the number of different lists that may wait for each user. The gateway rejects more with 429.
	maxFallbackQueue = 16
	// maxPriorityFallbackQueue is the number of lists that may wait for each service, node and user of system:masters.
	// The informers of a process list about 30 resources at its start. A rejected list delays the start by a second.
	maxPriorityFallbackQueue = 64
)

// Service is a running gateway.
type Service struct {
	config    *Config
	deps      Deps
	server    *server.Server
	authz     *delegatedauth.Authorizer
	discovery *discovery.Watcher
	// sharedReports shares concurrent readings of all processes' reports.
	sharedReports coalesce.Group[*console.Cluster]
	// turns are the turns of long lists and initial events. The kernel and the watch tier use other processors for the
	// same responses.
	turns *turns.Turns
	// usages and slow are nil without the console.
	usages         *watch.Usages
	slow           *routing.SlowRequests
	admissionRules *routing.AdmissionRules
	views          *views
	// handler serves clients, and loopback the other services of the process.
	handler, loopback http.Handler
	health            map[checkName]*check
	hooks             registryHooksProgress
	// joinable is closed when the gateway may take a part of the connections of a shared port.
	joinable chan struct{}
	// started is closed when all checks of the start have succeeded.
	started   chan struct{}
	files     reload.Files
	auditor   *audit.Auditor
	heartbeat *heartbeat
	// flowControl is nil if API Priority and Fairness is disabled.
	flowControl *flowcontrol.Fairness
	// external is the address at which clients reach the gateway, as host:port.
	external string
	ready    lifecycle.Readiness
	traffic  telemetry.Traffic
}

// New returns a gateway that is not running yet. It reads certificates and the audit policy, and opens the audit
// backends.
func New(ctx context.Context, c *Config, d Deps) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	metrics.Register()
	flowcontrolmetrics.Register()
	handlersmetrics.Register()
	cachermetrics.Register()
	proxymetrics.Register()
	utilfeature.DefaultMutableFeatureGate.AddMetrics()
	compatibility.DefaultComponentGlobalsRegistry.AddMetrics()
	out, err := c.Egress.Open()
	if err != nil {
		return nil, err
	}
	proxyHandler, err := proxy.New(&c.Proxy, out.Cluster())
	if err != nil {
		return nil, err
	}
	apiServices, err := aggregation.New(&c.Aggregation, out.Cluster())
	if err != nil {
		return nil, err
	}
	g := &Service{
		config:         c,
		deps:           d,
		server:         server.NewServer(&c.Server),
		authz:          &delegatedauth.Authorizer{Client: d.Authz},
		admissionRules: &routing.AdmissionRules{Client: d.Admission},
		external:       c.externalAddress(),
		hooks:          registryHooksProgress{registry: d.Discovery},
		turns:          turns.OfProcessors(),
		joinable:       make(chan struct{}),
		started:        make(chan struct{}),
	}
	g.heartbeat = newHeartbeat(d.Discovery, c.advertiseAddress(), g.started, g.server.ShuttingDown)
	if d.Report != nil {
		g.heartbeat.process = g.reportEncoder
	}
	if c.Console {
		g.usages, g.slow = new(watch.Usages), new(routing.SlowRequests)
	}
	for _, name := range startChecks() {
		g.ready.Set(string(name), errNotResponded)
	}
	if g.auditor, err = audit.New(ctx, &c.Audit, out.ControlPlane(), &g.files); err != nil {
		return nil, err
	}
	g.views = newViews(g.external, d.Discovery, apiServices)
	g.discovery = &discovery.Watcher{
		Registry:    d.Discovery,
		OnChange:    g.views.publish,
		AfterChange: g.heartbeat.serves,
	}
	names, prefixes := c.Server.FrontProxyHeaders()
	authn := delegatedauth.NewAuthenticator(d.Authn, names, prefixes)
	authn.RejectsAnonymous = g.authz.RejectsAnonymous
	router := g.router(proxyHandler)
	api := g.mux(router)
	g.loopback = server.BuildLoopbackChain(api, g.authz, g.auditor)
	if c.FlowControl.Enabled {
		g.flowControl, err = flowcontrol.New(flowControlClient(api, g.auditor), &g.heartbeat.live,
			c.Server.MaxInFlight+c.Server.MaxMutating)
		if err != nil {
			return nil, err
		}
		router.RecordListSize = g.flowControl.RecordListSize
		router.ListSize = g.flowControl.ListSize
	}
	g.handler = g.server.BuildHandlerChain(api, server.ChainConfig{
		Authn:       authn,
		Authz:       g.authz,
		Auditor:     g.auditor,
		Fairness:    g.flowControl,
		BuffersBody: g.servedLocally,
		MetricsInfo: g.metricsInfo,
	})
	return g, nil
}

// flowControlClient returns the configuration of flow control's client of the gateway's own API. authz decides none of
// its requests.
func flowControlClient(api http.Handler, auditor *audit.Auditor) *rest.Config {
	own := flowcontrol.LoopbackAuthorizer
	return loopback.ClientConfig(
		server.BuildLoopbackChain(delegatedauth.WithAuthorizer(api, own), own, auditor),
		&user.DefaultInfo{Name: identity.GatewayUser, Groups: []string{identity.ServicesGroup}},
	)
}

// Collectors returns the metrics of this system's own. kube-apiserver's metrics are in the registry that its libraries
// share (legacyregistry).
func (g *Service) Collectors() []prometheus.Collector {
	return slices.Concat(watch.Metrics(), delegatedauth.Metrics(), audit.Metrics(), body.Metrics(),
		server.Metrics(), []prometheus.Collector{
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "watershed_gateway_long_responses_waiting",
				Help: "Number of long lists and initial events of watches that wait for a turn on the processors.",
			}, func() float64 { return float64(g.turns.Waiting()) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "watershed_gateway_tls_handshakes_waiting",
				Help: "Number of TLS handshakes that wait for a turn on the processors.",
			}, func() float64 { return float64(g.server.Handshakes.Waiting()) }),
		})
}

// API returns the handler with which the other services of the process call the API. It authorizes their requests.
func (g *Service) API() http.Handler { return g.loopback }

// Files returns the page of the files that the gateway reloads while it runs.
func (g *Service) Files() http.Handler { return &g.files }

// Draining reports whether the gateway is shutting down. Load balancers should then send no new client.
func (g *Service) Draining() bool {
	select {
	case <-g.server.ShuttingDown:
		return true
	default:
		return false
	}
}

// Run serves until ctx ends, shuts down, and flushes the audit log.
func (g *Service) Run(ctx context.Context) error {
	g.ready.Set("server", errNotListening)
	var wg sync.WaitGroup
	serviceCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { g.watchServices(serviceCtx) })
	wg.Go(func() { g.files.Run(serviceCtx) })
	wg.Go(func() { g.runFlowControl(serviceCtx) })
	err := g.server.Run(ctx, g.handler, g.joinable, func() { g.ready.Set("server", nil) })
	g.auditor.Close()
	cancel()
	wg.Wait()
	return err
}

// runFlowControl runs flow control until ctx ends. Without flow control it starts upstream's goroutine that updates
// apiserver_current_inflight_requests. That goroutine ends with ctx, and Run does not wait for it.
func (g *Service) runFlowControl(ctx context.Context) {
	if g.flowControl != nil {
		g.flowControl.Run(ctx)
		return
	}
	genericfilters.StartMaxInFlightWatermarkMaintenance(ctx.Done())
}

// watchServices runs the streams and tasks that follow the other services, until ctx ends.
func (g *Service) watchServices(ctx context.Context) {
	var wg sync.WaitGroup
	for _, run := range []func(context.Context){
		g.discovery.Run, g.awaitStart, g.admissionRules.Run, g.views.discoveryManager.Run, g.authz.Run,
		g.heartbeat.run,
	} {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
}

// tierContext routes a call to the replicas that own namespaces.
func tierContext(ctx context.Context) context.Context { return rpc.WithHashKey(ctx, "namespaces") }
