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
	"google.golang.org/grpc"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/discovery"
	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/internalwatch"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/managed"
	"watershed.dev/services/registry/objects"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
)

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
	// ownService configures the clients of conversion webhooks at the API's own Service; nil: there is no gateway.
	ownService *restclient.Config
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
	// Gateway calls the gateway; nil: the registry has no gateway to call.
	Gateway *apiclient.Conn
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
	if d.Gateway != nil {
		if s.ownService, err = d.Gateway.OwnService(); err != nil {
			return nil, err
		}
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
	if err := s.initServers(store, logJS); err != nil {
		return nil, err
	}
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

// Register registers the four services on g.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	registryv1.RegisterObjectsServer(g, s.objects)
	registryv1.RegisterDiscoveryServer(g, s.discovery)
	registryv1.RegisterSourceServer(g, s.source)
	watchfanoutv1.RegisterInternalWatchServer(g, s.internalWatch)
}

// Collectors returns the service's metrics.
func (s *Service) Collectors() []prometheus.Collector {
	return slices.Concat(eventlog.Metrics(), publisher.Metrics(), managed.Metrics(), storage.Metrics(),
		[]prometheus.Collector{inconsistencies})
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
	s.tasks.Go(ctx, "certificate authorities", s.controllers.ReloadAuthorities)
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
