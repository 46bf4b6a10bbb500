// Package registry owns the objects of a cluster: the verbs over storage, the catalogue of what is served, the event
// log's publisher and the loops that keep a fresh cluster as kube-apiserver would. It alone speaks to etcd, and it
// calls no other service: what a write needs to know of admission and authorization it asks back in the write's stream.
package registry

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/apis"
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
	registryv1.UnimplementedRegistryServer
	config    *Config
	store     *storage.Storage
	set       *apis.Set
	nats      *nats.Conn
	js        jetstream.JetStream
	loopback  *loopback
	informers informers.SharedInformerFactory
	client    *kubernetes.Clientset
	identity  string
	revisions coalescer
	tail      *tail

	catalogMu sync.Mutex
	catalog   *registryv1.CatalogResponse
	changed   chan struct{}
	ready     atomic.Bool
}

// New connects and builds everything that is served. id is the registry's identity on the inner network.
func New(ctx context.Context, c *Config, id rpc.TLS) (*Service, error) {
	resources, err := c.APIs.Resources()
	if err != nil {
		return nil, err
	}
	s := &Service{config: c, changed: make(chan struct{}), tail: newTail()}
	host, _ := os.Hostname()
	s.identity = fmt.Sprintf("%s-%d-%d", host, os.Getpid(), time.Now().UnixNano())
	if s.store, err = storage.Open(c.Storage, resources); err != nil {
		return nil, err
	}
	if s.nats, s.js, err = c.Log.Connect("registry", id); err != nil {
		return nil, err
	}
	s.revisions.read = s.readRevision
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
	s.catalog = s.set.Catalog()
	return s, nil
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
func (s *Service) Register(g grpc.ServiceRegistrar) { registryv1.RegisterRegistryServer(g, s) }

// Collectors are the service's metrics.
func (s *Service) Collectors() []prometheus.Collector { return publisher.Metrics() }

// Ready says why the registry cannot serve yet, or nil.
func (s *Service) Ready(ctx context.Context) error {
	if !s.ready.Load() {
		return fmt.Errorf("the service allocators are not synced yet")
	}
	_, err := s.revisions.get(ctx)
	return err
}

// Run publishes (when elected), runs the loops (when elected) and serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	defer s.store.Close()
	defer s.nats.Close()
	defer s.informers.Shutdown()
	p := &publisher.Publisher{Storage: s.store, Log: &s.config.Log, NATS: s.nats, JS: s.js, Identity: s.identity, CompactionInterval: s.config.Storage.CompactionInterval}
	l := &loops.Loops{Options: s.config.Loops, Client: s.client, Loopback: s.loopback.config(), Informers: s.informers, Hooks: s.set.Hooks, Groups: s.set.Groups,
		Storage: s.store, APIs: &s.config.APIs, Identity: s.identity}
	if err := l.Prepare(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	background := func(name string, run func(context.Context) error) {
		wg.Go(func() {
			defer rpc.Recover(name)
			if err := run(ctx); err != nil && ctx.Err() == nil {
				slog.Error("Ended", "task", name, "error", err)
			}
		})
	}
	background("publisher", p.Run)
	background("tail", func(ctx context.Context) error { return eventlog.Read(ctx, s.js, s.tail.take) })
	background("loops", func(ctx context.Context) error {
		return publisher.Elect(ctx, s.store.Client.Client, loops.ElectionKey, s.identity, l.Run)
	})
	s.informers.Start(ctx.Done())
	background("informers", func(ctx context.Context) error {
		s.informers.WaitForCacheSync(ctx.Done())
		s.ready.Store(true)
		return nil
	})
	<-ctx.Done()
	wg.Wait()
	return nil
}

func (s *Service) readRevision(ctx context.Context) (int64, error) {
	resp, err := s.store.Client.Client.Get(ctx, publisher.ElectionKey)
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}
