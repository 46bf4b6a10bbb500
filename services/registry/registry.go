package registry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	extensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/crd"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/features"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/discovery"
	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/internalwatch"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/loopback"
	"watershed.dev/services/registry/managed"
	"watershed.dev/services/registry/objects"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
)

// Config is the registry's configuration.
type Config struct {
	Storage     storage.Options
	APIs        installer.Options
	Log         eventlog.Options
	Controllers controllers.Options
	Egress      egress.Config

	ServiceAccountSigningKeyFile string
	// ServiceAccountSigningEndpoint is the socket of an external signer. Empty: the key file signs.
	ServiceAccountSigningEndpoint string
	ServiceAccountIssuers         []string
	APIAudiences                  []string
	MaxTokenExpiration            time.Duration
	ExtendTokenExpiration         bool
}

// NewConfig returns a configuration with the defaults.
func NewConfig() *Config { return &Config{APIs: installer.NewOptions()} }

// AddFlags adds a flag per setting to fs, with kube-apiserver's name if it has the setting.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Storage.AddFlags(fs)
	c.APIs.AddFlags(fs)
	c.Log.AddFlags(fs)
	c.Controllers.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.StringVar(&c.ServiceAccountSigningKeyFile, "service-account-signing-key-file", "",
		"Path to the file that contains the current private key of the service account token issuer.")
	fs.StringVar(&c.ServiceAccountSigningEndpoint, "service-account-signing-endpoint", "",
		"Path to the socket where an external JWT signer is listening. This flag is mutually exclusive with "+
			"--service-account-signing-key-file and --service-account-key-file.")
	fs.StringArrayVar(&c.ServiceAccountIssuers, "service-account-issuer", nil,
		"Identifier of the service account token issuer; the first one issues.")
	fs.StringSliceVar(&c.APIAudiences, "api-audiences", nil,
		"Identifiers of the API. The default is the service account issuer.")
	fs.DurationVar(&c.MaxTokenExpiration, "service-account-max-token-expiration", 0,
		"The maximum validity duration of a token created by the service account token issuer.")
	fs.BoolVar(&c.ExtendTokenExpiration, "service-account-extend-token-expiration", true,
		"Turns on projected service account expiration extension during token generation.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	_, _, rangeErr := c.APIs.ServiceIPRanges()
	return errors.Join(c.Storage.Validate(), rangeErr, c.Log.Validate(), c.Controllers.Validate())
}

// Service is a running registry.
type Service struct {
	config   *Config
	identity string
	// egressSelector dials addresses outside of Watershed.
	egressSelector egress.Selector
	nats           *nats.Conn
	js             jetstream.JetStream
	// logNATS is the connection of ReadLog. It is separate, so that its responses do not delay the publisher's on nats.
	logNATS *nats.Conn

	resources     *lookup.Resources
	objects       *objects.Objects
	source        *source.Source
	discovery     *discovery.Discovery
	internalWatch *internalwatch.Logs
	// logs are the event logs of all etcds, the main etcd's first.
	logs []*etcdLog
	// dataKeys encrypt messages of the event logs.
	dataKeys *storage.DataKeys

	// loopback is the configuration of a client of the registry's own handlers. client, informers and extensions use
	// it: built-in resources, and CRDs.
	loopback   *restclient.Config
	client     *kubernetes.Clientset
	informers  informers.SharedInformerFactory
	extensions extensions.SharedInformerFactory
	// services resolves the addresses of conversion webhooks and aggregated API servers.
	services apiclient.ServiceResolver
	// startHooks is the progress of the controllers on the elected replica.
	startHooks  *controllers.StartHooks
	controllers *controllers.Controllers
	// crdHandler reports whether the handler has processed all CRDs of the initial list.
	crdHandler cache.ResourceEventHandlerRegistration

	tasks lifecycle.Supervisor
}

// Deps are the dependencies of a registry.
type Deps struct {
	// ID is the registry's identity on the inner network.
	ID rpc.TLS
	// Starting receives why New waits.
	Starting func(reason error)
}

// New connects to etcd and NATS and builds all servers. It waits until etcd responds or ctx ends.
func New(ctx context.Context, c *Config, d Deps) (*Service, error) {
	served, err := c.APIs.APIResourceConfig()
	if err != nil {
		return nil, err
	}
	selector, err := c.Egress.Open()
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	s := &Service{
		config:         c,
		egressSelector: selector,
		identity:       fmt.Sprintf("%s-%d-%d", host, os.Getpid(), time.Now().UnixNano()),
	}
	s.tasks.Ready.Set("informers", errors.New("not synced yet"))
	s.tasks.Ready.Set("etcd", errors.New("no response yet"))
	etcdmetrics.Register()
	metrics.Register()
	store, err := storage.Open(ctx, c.Storage, selector, served, s.identity)
	if err != nil {
		return nil, err
	}
	if s.nats, s.js, err = connect(&c.Log, d.ID); err != nil {
		return nil, err
	}
	logNATS, logJS, err := connect(&c.Log, d.ID)
	if err != nil {
		return nil, err
	}
	s.logNATS = logNATS
	s.initServers(store, logJS)
	if err := s.checkLogOwners(ctx); err != nil {
		return nil, err
	}
	if err := s.waitForEtcd(ctx, d.Starting); err != nil {
		return nil, err
	}
	if err := s.initLoopback(); err != nil {
		return nil, err
	}
	if s.resources.BuiltIn, err = s.builtIn(ctx, served); err != nil {
		return nil, err
	}
	if err := store.CheckOverrides(); err != nil {
		return nil, err
	}
	if err := s.waitForSameCluster(ctx, d.Starting); err != nil {
		return nil, err
	}
	if err := s.initCustomResources(); err != nil {
		return nil, err
	}
	s.controllers = s.newControllers()
	endpoints, err := s.controllers.Prepare()
	if err != nil {
		return nil, err
	}
	if endpoints != nil {
		s.discovery.Endpoints = endpoints
	}
	return s, s.discovery.WatchAPIServices(s.loopback, s.informers, c.Controllers.AggregatorRouting)
}

// ownerTimeout bounds the check of the log's owner. NATS may start later, and the publisher checks again.
const ownerTimeout = 2 * time.Second

// checkLogOwners returns an error if the NATS servers hold an event log of another control plane.
func (s *Service) checkLogOwners(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	for _, l := range s.logs {
		if err := l.options.CheckOwner(ctx, s.js); errors.Is(err, eventlog.ErrOtherOwner) {
			return fmt.Errorf("--nats-url %q: %w", s.config.Log.URL, err)
		}
	}
	return nil
}

// connect connects to NATS as the registry.
func connect(o *eventlog.Options, id rpc.TLS) (*nats.Conn, jetstream.JetStream, error) {
	conn, err := o.Connect("registry", id)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, js, nil
}

// initServers builds the publishers and the servers. ReadLog reads logJS.
func (s *Service) initServers(store *storage.Storage, logJS jetstream.JetStream) {
	s.dataKeys = storage.NewDataKeys(store, publisher.KeyPrefix(s.config.Log.Name, eventlog.Main)+"data-keys/",
		s.config.Log.Retention)
	s.resources = &lookup.Resources{Storage: store}
	s.objects = objects.New(s.resources)
	streams := map[eventlog.LogID]eventlog.StreamReader{}
	for _, etcd := range store.Etcds() {
		streams[etcd.Log] = eventlog.DirectGetReader{JS: logJS, Log: etcd.Log}
	}
	s.source = source.New(s.resources, s.dataKeys, streams)
	s.discovery = discovery.New(s.resources)
	s.startHooks = &controllers.StartHooks{Storage: store, Identity: s.identity}
	s.discovery.PendingStartHooks = s.startHooks.Pending
	s.internalWatch = &internalwatch.Logs{
		Resources: s.resources,
		ByLog:     map[eventlog.LogID]*internalwatch.InternalWatch{},
	}
	for _, etcd := range store.Etcds() {
		l := s.newEtcdLog(etcd)
		s.logs = append(s.logs, l)
		s.internalWatch.ByLog[etcd.Log] = internalwatch.New(s.resources, s.source, etcd, l.watchCache, l.logReader,
			l.awaitEpoch)
	}
}

// initLoopback creates the registry's own API client, its informers, and the namespaces that they track. A live lookup
// of a namespace has a timeout of its own.
func (s *Service) initLoopback() (err error) {
	s.loopback = loopback.New(s.resources, s.internalWatch.Local()).Config()
	if s.client, err = kubernetes.NewForConfig(s.loopback); err != nil {
		return err
	}
	s.informers = informers.NewSharedInformerFactory(s.client, 10*time.Minute)
	liveConfig := restclient.CopyConfig(s.loopback)
	liveConfig.Timeout = liveLookupTimeout
	liveClient, err := kubernetes.NewForConfig(liveConfig)
	if err != nil {
		return err
	}
	s.objects.Namespaces, err = objects.NewNamespaces(s.informers, liveClient, s.logs[0].logReader.Fresh)
	return err
}

// builtIn builds the built-in resources.
func (s *Service) builtIn(ctx context.Context, served *serverstorage.ResourceConfig) (*installer.Set, error) {
	c := s.config
	tokens, err := c.tokenConfig(ctx)
	if err != nil {
		return nil, err
	}
	audiences := c.APIAudiences
	if len(audiences) == 0 {
		audiences = c.ServiceAccountIssuers
	}
	return installer.InstallAPIs(&c.APIs, s.resources.Storage, served, installer.Deps{
		Loopback:        s.loopback,
		Client:          s.client,
		Informers:       s.informers,
		TokenIssuer:     tokens.issuer,
		TokenAudiences:  audiences,
		MaxTokenExpiry:  tokens.maxExpiration,
		ExtendExpiry:    c.ExtendTokenExpiration,
		MaxExtendedTime: tokens.extendedExpiration,
		OnCRDUpdate:     func(obj runtime.Object) { s.resources.Custom.Updated(obj) },
	})
}

// initCustomResources builds the set of custom resources and the handler of CRDs.
func (s *Service) initCustomResources() error {
	client, err := extensionsclient.NewForConfig(s.loopback)
	if err != nil {
		return err
	}
	s.extensions = extensions.NewSharedInformerFactoryWithOptions(client, 5*time.Minute,
		extensions.WithTransform(crd.Transform))
	crds := &customresources.Set{
		Storage:  s.resources.Storage,
		BuiltIn:  s.resources.BuiltIn.HasVersion,
		OnChange: s.discovery.Invalidate,
		Fresh:    s.logs[0].logReader.JustVerified,
	}
	if crds.Models, err = s.resources.BuiltIn.CRDModels(); err != nil {
		return err
	}
	s.resources.BuiltIn.ReleaseOpenAPIDefinitions()
	if s.services, err = apiclient.NewServiceResolver(s.informers, s.config.Controllers.AggregatorRouting); err != nil {
		return err
	}
	crds.Converters = crd.NewConverters(s.services, crd.Webhooks(s.egressSelector, s.loopback))
	s.resources.Custom = crds
	s.crdHandler, err = s.extensions.Apiextensions().V1().CustomResourceDefinitions().Informer().
		AddEventHandler(crds.Handler())
	return err
}

// Register registers the four services on g.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	registryv1.RegisterObjectsServer(g, s.objects)
	registryv1.RegisterDiscoveryServer(g, s.discovery)
	registryv1.RegisterSourceServer(g, s.source)
	watchfanoutv1.RegisterInternalWatchServer(g, s.internalWatch)
}

// Collectors returns the service's metrics.
func (s *Service) Collectors() []prometheus.Collector {
	return slices.Concat(publisher.Metrics(), managed.Metrics(), storage.Metrics())
}

// Ready returns the readiness of the registry. It is not ready if informers are not synced, a task is down, or etcd
// does not respond.
func (s *Service) Ready() *lifecycle.Readiness { return &s.tasks.Ready }

// Run runs all tasks until ctx is done. The publisher and the controllers run while this replica is elected.
func (s *Service) Run(ctx context.Context) error {
	defer s.resources.Storage.Close()
	defer s.nats.Close()
	defer s.logNATS.Close()
	defer s.informers.Shutdown()
	defer s.extensions.Shutdown()
	defer s.discovery.APIServices.Informers.Shutdown()
	s.tasks.Go(ctx, "etcd", s.checkEtcd)
	s.tasks.Go(ctx, "encryption", s.resources.Storage.CheckEncryption)
	s.tasks.Go(ctx, "sweep", s.sweep)
	for _, l := range s.logs {
		l.run(ctx, &s.tasks)
	}
	s.tasks.Go(ctx, "controllers", func(ctx context.Context) error {
		candidate := election.Candidate{
			Client:   s.resources.Storage.Client.Client,
			Key:      s.resources.Storage.OwnKey(controllers.ElectionKey),
			Identity: s.identity,
			Lead:     s.controllers.Run,
			// Each kube-apiserver on a shared etcd runs these controllers too.
			LeadWithoutLease: s.controllers.Run,
		}
		return candidate.Run(ctx)
	})
	if controllers.HasIdentityLease() {
		s.tasks.Go(ctx, "identity lease", s.controllers.RenewIdentityLease)
	}
	s.informers.Start(ctx.Done())
	s.extensions.Start(ctx.Done())
	s.discovery.APIServices.Informers.Start(ctx.Done())
	if period := s.config.Storage.CountPollPeriod; period > 0 {
		s.tasks.Go(ctx, "counts of custom resources", func(ctx context.Context) error {
			cache.WaitForCacheSync(ctx.Done(), s.crdHandler.HasSynced)
			return s.resources.Custom.CountObjects(ctx, period)
		})
	}
	s.tasks.Go(ctx, "discovery", func(ctx context.Context) error {
		s.informers.WaitForCacheSync(ctx.Done())
		s.extensions.WaitForCacheSync(ctx.Done())
		cache.WaitForCacheSync(ctx.Done(), s.crdHandler.HasSynced) // CRDs are processed, not only read
		s.discovery.APIServices.Informers.WaitForCacheSync(ctx.Done())
		s.discovery.Rebuild()
		s.tasks.Ready.Set("informers", nil)
		return s.discovery.Run(ctx)
	})
	<-ctx.Done()
	s.tasks.Wait()
	for _, l := range s.logs {
		l.tasks.Wait()
	}
	return nil
}

// newControllers returns upstream's controllers, which run while this replica is elected.
func (s *Service) newControllers() *controllers.Controllers {
	return &controllers.Controllers{
		Options:    s.config.Controllers,
		Client:     s.client,
		Loopback:   s.loopback,
		Informers:  s.informers,
		Hooks:      s.resources.BuiltIn.Hooks,
		Groups:     s.resources.BuiltIn.Groups,
		Storage:    s.resources.Storage,
		APIs:       &s.config.APIs,
		Identity:   s.identity,
		Extensions: s.extensions,
		CRClients:  s.resources.Custom,
		Services:   s.services,
		Dialer:     s.egressSelector.Cluster(),
		StartHooks: s.startHooks,

		ServedByAll: s.servedByAll,
	}
}
