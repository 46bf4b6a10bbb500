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
	"watershed.dev/services/gateway/access"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/answer"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/edge"
	"watershed.dev/services/gateway/fairness"
	"watershed.dev/services/gateway/loopback"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/streaming"
	"watershed.dev/services/gateway/watch"
)

// Config is what a gateway is told.
type Config struct {
	Edge              edge.Config
	AdvertiseAddress  string
	ExternalHostname  string
	MinRequestTimeout int
	Watch             watch.Config
	TierGets          bool
	Profiling         bool
	Aggregation       aggregation.Config
	Streaming         streaming.Config
	Audit             audit.Config
	Fairness          fairness.Config
	Egress            egress.Config
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, true)
	c.Edge.AddFlags(fs)
	c.Watch.AddFlags(fs)
	c.Aggregation.AddFlags(fs)
	c.Streaming.AddFlags(fs)
	c.Audit.AddFlags(fs)
	c.Fairness.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.BoolVar(&c.TierGets, "gets-from-watch-tier", false,
		"Whether a GET of an object as it is stored is answered by the watch tier, as fresh as etcd, in place of "+
			"registry. It is cheaper where both are in one process.")
	fs.BoolVar(&c.Profiling, "profiling", true, "Enable profiling via web interface host:port/debug/pprof/.")
	fs.StringVar(&c.AdvertiseAddress, "advertise-address", "",
		"The IP address on which to advertise the API to members of the cluster.")
	fs.StringVar(&c.ExternalHostname, "external-hostname", "",
		"The hostname to use when generating externalized URLs for this master (e.g. Swagger API Docs or OpenID "+
			"Discovery).")
	fs.IntVar(&c.MinRequestTimeout, "min-request-timeout", 1800,
		"The minimum number of seconds a watch without timeoutSeconds stays open; each gets a random value above it.")
}

// externalAddress is where clients reach the gateway, as host:port (k8s.io/apiserver/pkg/server, Config.Complete, and
// k8s.io/kubernetes/pkg/controlplane/apiserver/options, Complete).
func (c *Config) externalAddress() string {
	host := c.ExternalHostname
	if host == "" {
		host = c.AdvertiseAddress
	}
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	if host == "" {
		if ip, err := utilnet.ResolveBindAddress(net.ParseIP(c.Edge.BindAddress)); err == nil {
			host = ip.String()
		} else if host, err = os.Hostname(); err != nil {
			host = "localhost"
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(c.Edge.SecurePort))
}

// Deps are the clients of the other services.
type Deps struct {
	Authn     authnv1.AuthnClient
	Authz     authzv1.AuthzClient
	Admission admissionv1.AdmissionClient
	Objects   registryv1.ObjectsClient
	Catalog   registryv1.DiscoveryClient
	Source    registryv1.SourceClient
	Watch     watchfanoutv1.WatchClient
	Policy    watchfanoutv1.InternalWatchClient
}

const (
	// maxFallbackLists is how many lists a gateway has registry answer at a time: each is a reading of etcd, decoded
	// and encoded, and is gathered for all who share it.
	maxFallbackLists = 4
	// maxFallbackQueue is how many different ones of one user may wait; who asks for more is told to come back (429).
	maxFallbackQueue = 16
)

// Service is a running gateway.
type Service struct {
	config    *Config
	deps      Deps
	server    *edge.Server
	authz     *access.Authorizer
	catalog   *discovery.Watcher
	interests *routing.Interests
	views     *views
	handler   http.Handler
	health    map[string]*check
	files     reload.Files
	auditor   *audit.Auditor
	// fairness is nil where requests are not bounded by flow.
	fairness *fairness.Fairness
	// external is where clients reach the gateway.
	external string
	ready    lifecycle.Readiness
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{} }

// New builds a gateway.
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
	carrier, err := streaming.New(&c.Streaming, out.Cluster())
	if err != nil {
		return nil, err
	}
	remotes, err := aggregation.New(&c.Aggregation, out.Cluster())
	if err != nil {
		return nil, err
	}
	g := &Service{
		config:    c,
		deps:      d,
		server:    edge.NewServer(&c.Edge),
		authz:     &access.Authorizer{Client: d.Authz},
		interests: &routing.Interests{Client: d.Admission},
		external:  c.externalAddress(),
	}
	if g.auditor, err = audit.New(ctx, &c.Audit, out.ControlPlane(), &g.files); err != nil {
		return nil, err
	}
	g.views = newViews(g.external, d.Catalog, remotes)
	g.catalog = &discovery.Watcher{Registry: d.Catalog, OnChange: g.views.publish}
	names, prefixes := c.Edge.FrontProxyHeaders()
	authn := access.NewAuthenticator(d.Authn, names, prefixes)
	router := g.router(carrier)
	api := g.mux(router)
	if c.Fairness.Enabled {
		as := &user.DefaultInfo{Name: identity.GatewayUser, Groups: []string{identity.ServicesGroup}}
		inside := loopback.Client(edge.Inside(api, fairness.Rights, g.auditor), as)
		g.fairness, err = fairness.New(inside, d.Catalog, c.Edge.MaxInFlight+c.Edge.MaxMutating)
		if err != nil {
			return nil, err
		}
		router.Answered = g.fairness.Answered
	}
	g.handler = g.server.Chain(api, edge.Parts{
		Authn:    authn,
		Authz:    g.authz,
		Auditor:  g.auditor,
		Fairness: g.fairness,
		Buffered: g.own,
		Labelled: g.labelled,
	})
	return g, nil
}

// validate follows k8s.io/apiserver/pkg/server/options/server_run_options.go.
func (c *Config) validate() error {
	switch reads, writes := c.Edge.MaxInFlight, c.Edge.MaxMutating; {
	case reads < 0:
		return fmt.Errorf("--max-requests-inflight %d: must not be negative", reads)
	case writes < 0:
		return fmt.Errorf("--max-mutating-requests-inflight %d: must not be negative", writes)
	case c.Fairness.Enabled && reads+writes == 0:
		return errors.New("--max-requests-inflight 0 and --max-mutating-requests-inflight 0: their sum must be positive " +
			"with --enable-priority-and-fairness")
	case c.MinRequestTimeout < 0:
		return fmt.Errorf("--min-request-timeout %d: must not be negative", c.MinRequestTimeout)
	}
	return errors.Join(c.Edge.Validate(), c.Watch.Validate())
}

// router is what answers requests for resources.
func (g *Service) router(carrier *streaming.Carrier) *routing.Router {
	c, d := g.config, &g.deps
	feeds, budgets, unsent := new(watch.Room), new(watch.Budgets), new(watch.Unsent)
	hub := func(from watch.Streams) *watch.Hub {
		return &watch.Hub{
			Client:   from,
			Config:   &c.Watch,
			Revision: g.revision,
			Room:     feeds,
			Budgets:  budgets,
			Unsent:   unsent,
		}
	}
	lists := func() *coalesce.Group[[]byte] {
		return &coalesce.Group[[]byte]{Limit: maxFallbackLists, Queue: maxFallbackQueue, Timeout: c.Edge.RequestTimeout}
	}
	r := &routing.Router{
		Catalog:           g.catalog,
		Interests:         g.interests,
		Objects:           d.Objects,
		Tier:              routing.Source{Lists: d.Watch, Watches: hub(d.Watch)},
		Policy:            routing.Source{Lists: d.Policy, Watches: hub(d.Policy)},
		Lists:             lists(),
		FirstLists:        lists(),
		Admission:         d.Admission,
		Authn:             d.Authn,
		Authz:             d.Authz,
		Authorize:         g.authz,
		Carrier:           carrier,
		MinRequestTimeout: time.Duration(c.MinRequestTimeout) * time.Second,
		Stopping:          g.server.Wave,
	}
	if c.TierGets {
		r.TierGets = d.Watch
	}
	return r
}

// mux sends a request to resources, discovery or the gateway's own pages.
func (g *Service) mux(router *routing.Router) http.Handler {
	own := http.NewServeMux()
	page(own, "/version", "application/json", writeVersion)
	own.Handle("/openapi/", g.views.openapi)
	own.Handle("/metrics", legacyregistry.HandlerWithReset())
	page(own, "/.well-known/openid-configuration", "application/json", g.issuerDocument)
	page(own, "/openid/v1/jwks", "application/jwk-set+json", g.issuerDocument)
	if g.config.Profiling {
		telemetry.Profiles(own)
	}
	slis.SLIMetricsWithReset{}.Install(own)
	if g.config.Fairness.Enabled {
		own.HandleFunc("/debug/api_priority_and_fairness/", func(w http.ResponseWriter, req *http.Request) {
			g.fairness.ServeHTTP(w, req)
		})
	}
	g.health = g.checks()
	for _, name := range needed {
		g.ready.Set(name, errNotAsked)
	}
	g.installHealth(own)
	own.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/" {
			answer.NotFound(w, req)
			return
		}
		g.index(w)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		switch group, version := groupVersion(req.URL.Path); {
		case group != "" && g.views.remotes.Handles(group, version):
			g.views.remotes.Serve(w, req, group, version)
		case ok && info.IsResourceRequest && (under(req.URL.Path, "/api") || under(req.URL.Path, "/apis")):
			router.ServeHTTP(w, req)
		case under(req.URL.Path, "/api"), under(req.URL.Path, "/apis"):
			g.views.discovery.ServeHTTP(w, req)
		case strings.Contains(req.URL.Path, "//"): // such a path is not cleaned, as kube-apiserver does not
			answer.NotFound(w, req)
		default:
			own.ServeHTTP(w, req)
		}
	})
}

// revision is etcd's now.
func (g *Service) revision(ctx context.Context) (int64, error) {
	r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{})
	return r.GetRevision(), err
}

// own says whether a request is for a resource that is served here, and is no connection to somewhere else.
func (g *Service) own(req *http.Request) bool {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || !info.IsResourceRequest || edge.LongRunning(req, info) {
		return false
	}
	group, version := groupVersion(req.URL.Path)
	return group == "" || !g.views.remotes.Handles(group, version)
}

// groupVersion is what follows /apis/ in a path that names a version.
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
		answer.NotFound(w, req)
		return
	}
	w.Header().Set("Content-Type", d.ContentType)
	w.Header().Set("Cache-Control", fmt.Sprintf("public, max-age=%d", d.MaxAgeSeconds))
	_, _ = w.Write(d.Body)
}

// Register offers nothing: the gateway is called over HTTPS alone.
func (g *Service) Register(grpc.ServiceRegistrar) {}

// Collectors are the gateway's own metrics; kube-apiserver's are in the registry that it shares with its libraries.
func (g *Service) Collectors() []prometheus.Collector {
	return slices.Concat(watch.Metrics(), access.Metrics(), audit.Metrics(), body.Metrics(),
		edge.Metrics())
}

// Files are those that are read anew while the gateway runs.
func (g *Service) Files() http.Handler { return &g.files }

// StopTimeout is how long the gateway takes to stop at most.
func (g *Service) StopTimeout() time.Duration {
	return g.config.Edge.StopTimeout() + audit.FlushTimeout
}

// Draining says whether the gateway has been told to stop: no new client is to come.
func (g *Service) Draining() bool {
	select {
	case <-g.server.ShuttingDown:
		return true
	default:
		return false
	}
}

// Run serves until ctx is done.
func (g *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	following, cancel := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { g.follow(following) })
	wg.Go(func() { g.files.Run(following) })
	if g.fairness != nil {
		wg.Go(func() { g.fairness.Run(following) })
	}
	err := g.server.Run(ctx, g.handler)
	g.auditor.Close()
	cancel()
	wg.Wait()
	return err
}

// follow keeps what the gateway knows of the other services until ctx is done.
func (g *Service) follow(ctx context.Context) {
	var wg sync.WaitGroup
	for _, run := range []func(context.Context){
		g.catalog.Run, g.awaitNeeded, g.interests.Run, g.views.learner.Run, g.authz.Run,
	} {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
}

// tierRoute leads a question to the replicas that namespaces are on.
func tierRoute(ctx context.Context) context.Context { return rpc.WithHashKey(ctx, "namespaces") }

// page serves GET of a path in one media type, and refuses all else as kube-apiserver's web framework does.
func page(mux *http.ServeMux, path, mediaType string, serve http.HandlerFunc) {
	only := func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Method != http.MethodGet:
			answer.Error(w, req, answer.V1, answer.MethodNotAllowed)
		case !answer.Produced(req.Header.Get("Accept"), []string{mediaType}):
			answer.Error(w, req, answer.V1, answer.NotProduced([]string{mediaType}))
		default:
			serve(w, req)
		}
	}
	mux.HandleFunc(path, only)
	mux.HandleFunc(path+"/{$}", only)
}

func writeVersion(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, kubeversion.Info())
}

// index lists the paths that are served.
func (g *Service) index(w http.ResponseWriter) {
	paths := []string{"/.well-known/openid-configuration", "/api", "/apis", "/healthz", "/livez", "/metrics",
		"/openapi/v2", "/openapi/v3", "/openid/v1/jwks", "/readyz", "/version"}
	if v := g.catalog.View(); v != nil {
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
