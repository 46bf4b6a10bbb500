// Package registry owns the objects of a cluster: the verbs over storage, the catalogue of what is served, the event
// log's publisher and the loops that keep a fresh cluster as kube-apiserver would. It alone speaks to etcd, and it
// calls no other service: what a write needs to know of admission and authorization it asks back in the write's stream.
package registry

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/conversion"
	extensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/util/keyutil"
	aggregator "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/features"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/apis"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/loops"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/storage"
)

// Config is what a registry is told.
type Config struct {
	Storage storage.Options
	APIs    apis.Options
	Log     eventlog.Options
	Loops   loops.Options

	ServiceAccountSigningKeyFile string
	ServiceAccountIssuers        []string
	APIAudiences                 []string
	MaxTokenExpiration           time.Duration
	ExtendTokenExpiration        bool
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{APIs: apis.NewOptions()} }

// AddFlags adds every setting to fs, under kube-apiserver's names where it has them.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, false)
	c.Storage.AddFlags(fs)
	c.APIs.AddFlags(fs)
	c.Log.AddFlags(fs)
	c.Loops.AddFlags(fs)
	fs.StringVar(&c.ServiceAccountSigningKeyFile, "service-account-signing-key-file", "", "Path to the file that contains the current private key of the service account token issuer.")
	fs.StringArrayVar(&c.ServiceAccountIssuers, "service-account-issuer", nil, "Identifier of the service account token issuer; the first one issues.")
	fs.StringSliceVar(&c.APIAudiences, "api-audiences", nil, "Identifiers of the API; the service account issuer where unset.")
	fs.DurationVar(&c.MaxTokenExpiration, "service-account-max-token-expiration", 0, "The maximum validity duration of a token created by the service account token issuer.")
	fs.BoolVar(&c.ExtendTokenExpiration, "service-account-extend-token-expiration", true, "Turns on projected service account expiration extension during token generation.")
}

// Service is a running registry.
type Service struct {
	registryv1.UnimplementedObjectsServer
	registryv1.UnimplementedCatalogServer
	registryv1.UnimplementedSourceServer
	config    *Config
	store     *storage.Storage
	set       *apis.Set
	nats      *nats.Conn
	js        jetstream.JetStream
	loopback  *loopback
	informers informers.SharedInformerFactory
	client    *kubernetes.Clientset
	identity  string
	revisions coalesce.Group[int64]
	tail      *tail
	policy    *policy

	// customs is what definitions define; extensions keeps it up to date.
	customs    *customresources.Table
	extensions extensions.SharedInformerFactory
	remotes    *remotes
	catalogue  *catalogue
	ready      atomic.Bool
	tasks      lifecycle.Supervisor
}

// Deps is what a registry is built with.
type Deps struct {
	// ID is its identity on the inner network.
	ID rpc.TLS
}

// New connects and builds everything that is served.
func New(ctx context.Context, c *Config, d Deps) (*Service, error) {
	resources, err := c.APIs.Resources()
	if err != nil {
		return nil, err
	}
	s := &Service{config: c, tail: newTail()}
	s.policy = newPolicy(s)
	s.catalogue = newCatalogue(s.makeCatalog)
	host, _ := os.Hostname()
	s.identity = fmt.Sprintf("%s-%d-%d", host, os.Getpid(), time.Now().UnixNano())
	etcdmetrics.Register()
	if s.store, err = storage.Open(c.Storage, resources); err != nil {
		return nil, err
	}
	if s.nats, s.js, err = c.Log.Connect("registry", d.ID); err != nil {
		return nil, err
	}
	s.revisions.Timeout = readTimeout
	if err := s.reachable(ctx); err != nil {
		return nil, err
	}
	s.loopback = &loopback{service: s}
	config := s.loopback.config()
	if s.client, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	s.informers = informers.NewSharedInformerFactory(s.client, 10*time.Minute)
	deps := apis.Deps{Loopback: config, Client: s.client, Informers: s.informers, TokenAudiences: c.APIAudiences,
		MaxTokenExpiry: c.MaxTokenExpiration, ExtendExpiry: c.ExtendTokenExpiration, MaxExtendedTime: serviceaccount.ExpirationExtensionSeconds * time.Second}
	if deps.TokenIssuer, err = c.tokenIssuer(); err != nil {
		return nil, err
	}
	if len(deps.TokenAudiences) == 0 {
		deps.TokenAudiences = c.ServiceAccountIssuers
	}
	if s.set, err = apis.BuiltIn(&c.APIs, s.store, resources, deps); err != nil {
		return nil, err
	}
	if err := s.follow(config); err != nil {
		return nil, err
	}
	return s, s.followRegistrations(config)
}

// follow makes ready to serve custom resources.
func (s *Service) follow(loopback *restclient.Config) error {
	client, err := extensionsclient.NewForConfig(loopback)
	if err != nil {
		return err
	}
	s.extensions = extensions.NewSharedInformerFactory(client, 5*time.Minute)
	s.customs = &customresources.Table{Storage: s.store, Changed: s.catalogue.touch}
	if s.customs.Models, err = s.set.Models(apiextensionsv1.GroupName); err != nil {
		return err
	}
	services, err := s.resolver()
	if err != nil {
		return err
	}
	wrapper := webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, loopback, noop.NewTracerProvider())
	if s.customs.Converters, err = conversion.NewCRConverterFactory(services, wrapper); err != nil {
		return err
	}
	_, err = s.extensions.Apiextensions().V1().CustomResourceDefinitions().Informer().AddEventHandler(s.customs.Handler())
	return err
}

// resolver finds the addresses of services that are called: conversion webhooks and aggregated servers.
func (s *Service) resolver() (aggregator.ServiceResolver, error) {
	services := s.informers.Core().V1().Services().Lister()
	if !s.config.Loops.AggregatorRouting {
		return aggregator.NewClusterIPServiceResolver(services), nil
	}
	slices, err := proxy.NewEndpointSliceIndexerGetter(s.informers.Discovery().V1().EndpointSlices())
	return aggregator.NewEndpointServiceResolver(services, slices), err
}

func (c *Config) tokenIssuer() (serviceaccount.TokenGenerator, error) {
	if c.ServiceAccountSigningKeyFile == "" {
		return nil, nil
	}
	if len(c.ServiceAccountIssuers) == 0 {
		return nil, fmt.Errorf("--service-account-issuer must be set with --service-account-signing-key-file")
	}
	key, err := keyutil.PrivateKeyFromFile(c.ServiceAccountSigningKeyFile)
	if err != nil {
		return nil, fmt.Errorf("--service-account-signing-key-file %q: %w", c.ServiceAccountSigningKeyFile, err)
	}
	return serviceaccount.JWTTokenGenerator(c.ServiceAccountIssuers[0], key)
}

// reachable waits for etcd: some storages read it while they are built.
func (s *Service) reachable(ctx context.Context) error {
	for {
		one, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err := s.readRevision(one)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		slog.Warn("etcd does not answer; trying again", "servers", s.config.Storage.Servers, "error", err)
		time.Sleep(200 * time.Millisecond)
	}
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	registryv1.RegisterObjectsServer(g, s)
	registryv1.RegisterCatalogServer(g, s)
	registryv1.RegisterSourceServer(g, s)
	watchfanoutv1.RegisterPolicyServer(g, s.policy)
}

// Drain ends the watches of those who decide, so that they go on at another registry.
func (s *Service) Drain() { s.policy.Drain() }

// Collectors are the service's metrics.
func (s *Service) Collectors() []prometheus.Collector { return publisher.Metrics() }

// Ready says why the registry cannot serve yet, or nil.
func (s *Service) Ready(ctx context.Context) error {
	if !s.ready.Load() {
		return fmt.Errorf("the informers are not synced yet")
	}
	if err := s.tasks.Down(); err != nil {
		return err
	}
	_, err := s.currentRevision(ctx)
	return err
}

// Run publishes (when elected), runs the loops (when elected) and serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	defer s.store.Close()
	defer s.nats.Close()
	defer s.informers.Shutdown()
	defer s.extensions.Shutdown()
	defer s.remotes.informers.Shutdown()
	services, err := s.resolver()
	if err != nil {
		return err
	}
	p := &publisher.Publisher{Storage: s.store, Log: &s.config.Log, NATS: s.nats, JS: s.js, Identity: s.identity, CompactionInterval: s.config.Storage.CompactionInterval}
	l := &loops.Loops{Options: s.config.Loops, Client: s.client, Loopback: s.loopback.config(), Informers: s.informers, Hooks: s.set.Hooks, Groups: s.set.Groups,
		Storage: s.store, APIs: &s.config.APIs, Identity: s.identity, Extensions: s.extensions, Customs: s.customs, Services: services}
	if err := l.Prepare(); err != nil {
		return err
	}
	s.tasks.Go(ctx, "publisher", p.Run)
	s.tasks.Go(ctx, "tail", func(ctx context.Context) error {
		s.tail.begin()
		return eventlog.Read(ctx, s.js, s.tail.take)
	})
	s.tasks.Go(ctx, "progress", func(ctx context.Context) error {
		return s.tail.compare(ctx, s.currentRevision, func() error { return s.nats.Publish(eventlog.AskProgress, nil) })
	})
	s.tasks.Go(ctx, "loops", func(ctx context.Context) error {
		return publisher.Elect(ctx, s.store.Client.Client, loops.ElectionKey, s.identity, l.Run)
	})
	s.informers.Start(ctx.Done())
	s.extensions.Start(ctx.Done())
	s.remotes.informers.Start(ctx.Done())
	s.tasks.Go(ctx, "catalogue", func(ctx context.Context) error {
		s.informers.WaitForCacheSync(ctx.Done())
		s.extensions.WaitForCacheSync(ctx.Done())
		s.remotes.informers.WaitForCacheSync(ctx.Done())
		s.catalogue.renew()
		s.ready.Store(true)
		return s.catalogue.run(ctx)
	})
	<-ctx.Done()
	s.tasks.Wait()
	return nil
}

// readTimeout bounds one read of etcd's revision; its callers may give up sooner.
const readTimeout = 5 * time.Second

// currentRevision is etcd's, as of a read that began after it was asked for; all who wait share one.
func (s *Service) currentRevision(ctx context.Context) (int64, error) {
	return s.revisions.Get(ctx, "", s.readRevision)
}

func (s *Service) readRevision(ctx context.Context) (int64, error) {
	resp, err := s.store.Client.Client.Get(ctx, publisher.ElectionKey)
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}
