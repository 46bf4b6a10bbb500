package registry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	extensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apimachinery/pkg/runtime"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/crd"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/discovery"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/internalwatch"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/loopback"
	"watershed.dev/services/registry/objects"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
)

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

// initServers builds the publishers and the servers. ReadLog reads logJS. The error is of --log-end-dir.
func (s *Service) initServers(store *storage.Storage, logJS jetstream.JetStream) error {
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
		l, err := s.newEtcdLog(etcd)
		if err != nil {
			return err
		}
		s.logs = append(s.logs, l)
		s.internalWatch.ByLog[etcd.Log] = internalwatch.New(s.resources, s.source, etcd, l.watchCache, l.logReader,
			l.awaitEpoch)
	}
	return nil
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

// liveLookupTimeout bounds a live lookup of a namespace that the informer lacks.
const liveLookupTimeout = 10 * time.Second

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
		BuiltIn:  s.resources.BuiltIn.HasGroup,
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
	crds.Converters = crd.NewConverters(s.services, crd.Webhooks(s.egressSelector, s.ownService))
	s.resources.Custom = crds
	s.crdHandler, err = s.extensions.Apiextensions().V1().CustomResourceDefinitions().Informer().
		AddEventHandler(crds.Handler())
	return err
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
