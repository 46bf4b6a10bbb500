package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	flowcontrolmetrics "k8s.io/apiserver/pkg/util/flowcontrol/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
	_ "k8s.io/component-base/metrics/prometheus/version" // kubernetes_build_info

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/lifecycle"
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
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/flowcontrol"
	"watershed.dev/services/gateway/loopback"
	"watershed.dev/services/gateway/proxy"
	"watershed.dev/services/gateway/responsewriters"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/server"
	"watershed.dev/services/gateway/watch"
)

// Config is the configuration of a gateway.
type Config struct {
	Server            server.Config
	AdvertiseAddress  string
	ExternalHostname  string
	MinRequestTimeout int
	Watch             watch.Config
	TierGets          bool
	Profiling         bool
	Aggregation       aggregation.Config
	Proxy             proxy.Config
	Audit             audit.Config
	FlowControl       flowcontrol.Config
	Egress            egress.Config
}

// AddFlags registers every flag of the gateway, with its default.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, true)
	c.Server.AddFlags(fs)
	c.Watch.AddFlags(fs)
	c.Aggregation.AddFlags(fs)
	c.Proxy.AddFlags(fs)
	c.Audit.AddFlags(fs)
	c.FlowControl.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.BoolVar(&c.TierGets, "gets-from-watch-tier", false,
		"Whether the watch tier, instead of registry, answers a GET of a stored object. The response is as fresh as "+
			"etcd. This is cheaper if both run in one process.")
	fs.BoolVar(&c.Profiling, "profiling", true, "Enable profiling via web interface host:port/debug/pprof/.")
	fs.StringVar(&c.AdvertiseAddress, "advertise-address", "",
		"The IP address on which to advertise the API to members of the cluster.")
	fs.StringVar(&c.ExternalHostname, "external-hostname", "",
		"The hostname to use when generating externalized URLs for this master (e.g. Swagger API Docs or OpenID "+
			"Discovery).")
	fs.IntVar(&c.MinRequestTimeout, "min-request-timeout", 1800,
		"The minimum number of seconds a watch without timeoutSeconds stays open; each gets a random value above it.")
}

// externalAddress returns the host:port at which clients reach the gateway. The rules are from Config.Complete
// (k8s.io/apiserver/pkg/server) and Complete (k8s.io/kubernetes/pkg/controlplane/apiserver/options).
func (c *Config) externalAddress() string {
	host := c.ExternalHostname
	if host == "" {
		host = c.AdvertiseAddress
	}
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	if host == "" {
		if ip, err := utilnet.ResolveBindAddress(net.ParseIP(c.Server.BindAddress)); err == nil {
			host = ip.String()
		} else if host, err = os.Hostname(); err != nil {
			host = "localhost"
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(c.Server.SecurePort))
}

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
}

const (
	// maxFallbackLists is the number of lists that the registry answers for a gateway at a time. Each list is read from
	// etcd, decoded, encoded, and buffered for all requests that share it.
	maxFallbackLists = 4
	// maxFallbackQueue is the number of different lists that may wait for each user. The gateway rejects more with 429.
	maxFallbackQueue = 16
)

// Service is a running gateway.
type Service struct {
	config         *Config
	deps           Deps
	server         *server.Server
	authz          *delegatedauth.Authorizer
	discovery      *discovery.Watcher
	admissionRules *routing.AdmissionRules
	views          *views
	handler        http.Handler
	health         map[string]*check
	files          reload.Files
	auditor        *audit.Auditor
	// flowControl is nil if API Priority and Fairness is disabled.
	flowControl *flowcontrol.Fairness
	// external is the address at which clients reach the gateway, as host:port.
	external string
	ready    lifecycle.Readiness
}

// NewConfig returns a configuration without values. AddFlags sets the defaults.
func NewConfig() *Config { return &Config{} }

// New returns a gateway that is not running yet. It reads certificates and the audit policy, and opens the audit
// backends.
func New(ctx context.Context, c *Config, d Deps) (*Service, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	metrics.Register()
	flowcontrolmetrics.Register()
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
	}
	if g.auditor, err = audit.New(ctx, &c.Audit, out.ControlPlane(), &g.files); err != nil {
		return nil, err
	}
	g.views = newViews(g.external, d.Discovery, apiServices)
	g.discovery = &discovery.Watcher{Registry: d.Discovery, OnChange: g.views.publish}
	names, prefixes := c.Server.FrontProxyHeaders()
	authn := delegatedauth.NewAuthenticator(d.Authn, names, prefixes)
	router := g.router(proxyHandler)
	api := g.mux(router)
	if c.FlowControl.Enabled {
		gatewayUser := &user.DefaultInfo{Name: identity.GatewayUser, Groups: []string{identity.ServicesGroup}}
		loopbackConfig := loopback.ClientConfig(
			server.BuildLoopbackChain(api, flowcontrol.LoopbackAuthorizer, g.auditor),
			gatewayUser,
		)
		g.flowControl, err = flowcontrol.New(loopbackConfig, d.Discovery, c.Server.MaxInFlight+c.Server.MaxMutating)
		if err != nil {
			return nil, err
		}
		router.RecordListSize = g.flowControl.RecordListSize
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

// validate follows k8s.io/apiserver/pkg/server/options/server_run_options.go.
func (c *Config) validate() error {
	switch reads, writes := c.Server.MaxInFlight, c.Server.MaxMutating; {
	case reads < 0:
		return fmt.Errorf("--max-requests-inflight %d: must not be negative", reads)
	case writes < 0:
		return fmt.Errorf("--max-mutating-requests-inflight %d: must not be negative", writes)
	case c.FlowControl.Enabled && reads+writes == 0:
		return errors.New(
			"--max-requests-inflight 0 and --max-mutating-requests-inflight 0: their sum must be positive " +
				"with --enable-priority-and-fairness",
		)
	case c.MinRequestTimeout < 0:
		return fmt.Errorf("--min-request-timeout %d: must not be negative", c.MinRequestTimeout)
	}
	return errors.Join(c.Server.Validate(), c.Watch.Validate())
}

// router returns the handler for requests for resources.
func (g *Service) router(proxyHandler *proxy.Handler) *routing.Router {
	c, d := g.config, &g.deps
	memoryQuota, rateLimiter, inflightQuota := new(watch.MemoryQuota), new(watch.RateLimiter), new(watch.InflightQuota)
	hub := func(source watch.Watcher) *watch.Hub {
		return &watch.Hub{
			Client:        source,
			Config:        &c.Watch,
			Revision:      g.revision,
			MemoryQuota:   memoryQuota,
			RateLimiter:   rateLimiter,
			InflightQuota: inflightQuota,
		}
	}
	lists := func() *coalesce.Group[[]byte] {
		return &coalesce.Group[[]byte]{
			Limit:   maxFallbackLists,
			Queue:   maxFallbackQueue,
			Timeout: c.Server.RequestTimeout,
		}
	}
	r := &routing.Router{
		Discovery:         g.discovery,
		AdmissionRules:    g.admissionRules,
		Objects:           d.Objects,
		Tier:              routing.Source{Lists: d.Watch, Watches: hub(d.Watch)},
		Internal:          routing.Source{Lists: d.InternalWatch, Watches: hub(d.InternalWatch)},
		Lists:             lists(),
		PriorityLists:     lists(),
		Admission:         d.Admission,
		Authn:             d.Authn,
		Authz:             d.Authz,
		Authorizer:        g.authz,
		Proxy:             proxyHandler,
		MinRequestTimeout: time.Duration(c.MinRequestTimeout) * time.Second,
		Stopping:          g.server.ShutdownStagger,
	}
	if c.TierGets {
		r.TierGets = d.Watch
	}
	return r
}

// mux returns a handler that sends a request to aggregated servers, resources, discovery, or the gateway's own pages.
func (g *Service) mux(router *routing.Router) http.Handler {
	pages := http.NewServeMux()
	page(pages, "/version", "application/json", writeVersion)
	pages.Handle("/openapi/", g.views.openapi)
	pages.Handle("/metrics", legacyregistry.HandlerWithReset())
	page(pages, "/.well-known/openid-configuration", "application/json", g.issuerDocument)
	page(pages, "/openid/v1/jwks", "application/jwk-set+json", g.issuerDocument)
	if g.config.Profiling {
		telemetry.Profiles(pages)
	}
	slis.SLIMetricsWithReset{}.Install(pages)
	if g.config.FlowControl.Enabled {
		pages.HandleFunc("/debug/api_priority_and_fairness/", func(w http.ResponseWriter, req *http.Request) {
			g.flowControl.ServeHTTP(w, req)
		})
	}
	g.health = g.checks()
	for _, name := range requiredChecks {
		g.ready.Set(name, errNotResponded)
	}
	g.installHealth(pages)
	pages.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/" {
			responsewriters.NotFound(w, req)
			return
		}
		g.index(w)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		switch group, version := groupVersion(req.URL.Path); {
		case group != "" && g.views.apiServices.Handles(group, version):
			g.views.apiServices.Serve(w, req, group, version)
		case ok && info.IsResourceRequest && (under(req.URL.Path, "/api") || under(req.URL.Path, "/apis")):
			router.ServeHTTP(w, req)
		case under(req.URL.Path, "/api"), under(req.URL.Path, "/apis"):
			g.views.discovery.ServeHTTP(w, req)
		case strings.Contains(req.URL.Path, "//"): // kube-apiserver does not clean such a path
			responsewriters.NotFound(w, req)
		default:
			pages.ServeHTTP(w, req)
		}
	})
}

// revision returns etcd's current revision, from registry.
func (g *Service) revision(ctx context.Context) (int64, error) {
	r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
	return r.GetRevision(), err
}

// servedLocally reports whether this system serves the request's resource and the request is not long-running. Such a
// request is no watch, and no connection to a kubelet, pod, service or node.
func (g *Service) servedLocally(req *http.Request) bool {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || !info.IsResourceRequest || server.LongRunning(req, info) {
		return false
	}
	group, version := groupVersion(req.URL.Path)
	return group == "" || !g.views.apiServices.Handles(group, version)
}

// groupVersion returns the group and version of a path /apis/<group>/<version>. Both are empty for another path.
func groupVersion(path string) (group, version string) {
	rest, ok := strings.CutPrefix(path, "/apis/")
	if !ok {
		return "", ""
	}
	group, rest, ok = strings.Cut(rest, "/")
	if version, _, _ = strings.Cut(rest, "/"); !ok || version == "" {
		return "", ""
	}
	return group, version
}

func under(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

func (g *Service) issuerDocument(w http.ResponseWriter, req *http.Request) {
	d, err := g.deps.Authn.IssuerDocument(req.Context(), &authnv1.IssuerDocumentRequest{
		Path:            strings.TrimSuffix(req.URL.Path, "/"),
		ExternalAddress: g.external,
	})
	if err != nil {
		responsewriters.NotFound(w, req)
		return
	}
	w.Header().Set("Content-Type", d.ContentType)
	w.Header().Set("Cache-Control", fmt.Sprintf("public, max-age=%d", d.MaxAgeSeconds))
	_, _ = w.Write(d.Body)
}

// Register registers no gRPC service: clients call the gateway over HTTPS only.
func (g *Service) Register(grpc.ServiceRegistrar) {}

// Collectors returns the metrics of this system's own. kube-apiserver's metrics are in the registry that its libraries
// share (legacyregistry).
func (g *Service) Collectors() []prometheus.Collector {
	return slices.Concat(watch.Metrics(), delegatedauth.Metrics(), audit.Metrics(), body.Metrics(),
		server.Metrics())
}

// Files returns the page of the files that the gateway reloads while it runs.
func (g *Service) Files() http.Handler { return &g.files }

// StopTimeout returns the maximum time that Run needs to return after its context ends.
func (g *Service) StopTimeout() time.Duration {
	return g.config.Server.StopTimeout() + audit.FlushTimeout
}

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
	var wg sync.WaitGroup
	serviceCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { g.watchServices(serviceCtx) })
	wg.Go(func() { g.files.Run(serviceCtx) })
	if g.flowControl != nil {
		wg.Go(func() { g.flowControl.Run(serviceCtx) })
	}
	err := g.server.Run(ctx, g.handler)
	g.auditor.Close()
	cancel()
	wg.Wait()
	return err
}

// watchServices runs the streams and tasks that follow the other services, until ctx ends.
func (g *Service) watchServices(ctx context.Context) {
	var wg sync.WaitGroup
	for _, run := range []func(context.Context){
		g.discovery.Run, g.awaitRequired, g.admissionRules.Run, g.views.discoveryManager.Run, g.authz.Run,
	} {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
}

// tierContext routes a call to the replicas that own namespaces.
func tierContext(ctx context.Context) context.Context { return rpc.WithHashKey(ctx, "namespaces") }

// page serves GET of a path in a single media type. It rejects other requests as kube-apiserver's web framework
// (go-restful) does.
func page(mux *http.ServeMux, path, mediaType string, serve http.HandlerFunc) {
	getOnly := func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Method != http.MethodGet:
			responsewriters.Error(w, req, responsewriters.V1, responsewriters.MethodNotAllowed)
		case !responsewriters.Acceptable(req.Header.Get("Accept"), []string{mediaType}):
			responsewriters.Error(w, req, responsewriters.V1, responsewriters.NewNotAcceptable([]string{mediaType}))
		default:
			serve(w, req)
		}
	}
	mux.HandleFunc(path, getOnly)
	mux.HandleFunc(path+"/{$}", getOnly)
}

func writeVersion(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, kubeversion.Info())
}

// index writes the list of served paths.
func (g *Service) index(w http.ResponseWriter) {
	paths := []string{"/.well-known/openid-configuration", "/api", "/apis", "/healthz", "/livez", "/metrics",
		"/openapi/v2", "/openapi/v3", "/openid/v1/jwks", "/readyz", "/version"}
	if v := g.discovery.View(); v != nil {
		for _, group := range v.Groups {
			if group.Name == "" {
				paths = append(paths, "/api/v1")
				continue
			}
			paths = append(paths, "/apis/"+group.Name)
			for _, ver := range group.Versions {
				paths = append(paths, "/apis/"+group.Name+"/"+ver)
			}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, map[string][]string{"paths": sorted(paths)})
}
