package watchfanout

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/conversion"
	"watershed.dev/services/watchfanout/list"
	"watershed.dev/services/watchfanout/logreader"
	"watershed.dev/services/watchfanout/watch"
)

// Config is what a replica is told.
type Config struct {
	Log            eventlog.Options
	RingBytes      int
	ProgressPeriod time.Duration
	// IdleTimeout is how long a resource that nobody reads is kept in memory.
	IdleTimeout time.Duration
	// CompressedBytes is how much is kept of lists as they are compressed.
	CompressedBytes int
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Log.AddFlags(fs)
	fs.IntVar(&c.RingBytes, "watch-ring-bytes", 32<<20,
		"How many bytes of recent events are kept in memory for each resource.")
	fs.IntVar(&c.CompressedBytes, "compressed-lists-bytes", 64<<20,
		"How many bytes of lists, compressed, are kept for those who ask for them so: what has not changed is "+
			"compressed once. 0: gateways compress each list by itself.")
	fs.DurationVar(&c.IdleTimeout, "cache-idle-timeout", 10*time.Minute,
		"How long the objects of a resource that nobody lists or watches stay in memory; they are read again on "+
			"demand. 0: for ever.")
	fs.DurationVar(&c.ProgressPeriod, "watch-progress-period", 2*time.Second,
		"How often a stream is told how far it has come: the bookmarks that gateways pass on when they are due.")
}

// Validate names the flag that is wrong.
func (c *Config) Validate() error {
	if c.CompressedBytes < 0 {
		return fmt.Errorf("--compressed-lists-bytes %d: must not be negative; 0 keeps nothing", c.CompressedBytes)
	}
	return nil
}

// Service is one replica.
type Service struct {
	watchfanoutv1.UnimplementedWatchServer
	config      *Config
	source      registryv1.SourceClient
	converter   *conversion.Converter
	discovery   *discovery.Watcher
	nats        *nats.Conn
	cache       *cache.Cache
	logReader   *logreader.Reader
	listServer  *list.Server
	watchServer *watch.Server
	tasks       lifecycle.Supervisor
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{} }

// Deps is what a replica is built with.
type Deps struct {
	// ID is its identity on the inner network.
	ID        rpc.TLS
	Source    registryv1.SourceClient
	Discovery registryv1.DiscoveryClient
}

// New builds a replica. It begins to serve when it has read the log to its end and knows what is served.
func New(_ context.Context, c *Config, d Deps) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s := &Service{config: c, source: d.Source, cache: cache.New(c.RingBytes, c.IdleTimeout)}
	s.tasks.Ready.Set("the catalog", errors.New("registry has not said what is served"))
	s.discovery = &discovery.Watcher{
		Registry: d.Discovery,
		OnChange: func(*discovery.View) { s.tasks.Ready.Set("the catalog", nil) },
	}
	var err error
	if s.nats, err = c.Log.Connect("watchfanout", d.ID); err != nil {
		return nil, err
	}
	s.converter = conversion.New(d.Source, s.cache)
	s.logReader = logreader.New(s.cache, s.nats, d.Source, &s.tasks.Ready)
	s.listServer = list.New(s.discovery, s.cache, s.logReader, s.converter, c.CompressedBytes)
	s.watchServer = watch.New(c.ProgressPeriod, s.discovery, s.cache, s.logReader, d.Source, s.converter)
	return s, nil
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { watchfanoutv1.RegisterWatchServer(g, s) }

// Ready is why the replica cannot serve: the log is not read as far as etcd, registry has not said what is served, or a
// task is down.
func (s *Service) Ready() *lifecycle.Readiness { return &s.tasks.Ready }

// Run reads the log until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	defer s.nats.Close()
	s.logReader.Run(ctx, &s.tasks)
	s.tasks.Go(ctx, "discovery", func(ctx context.Context) error {
		s.discovery.Run(ctx)
		return ctx.Err()
	})
	s.tasks.Go(ctx, "sweep", func(ctx context.Context) error {
		s.sweep(ctx)
		return ctx.Err()
	})
	<-ctx.Done()
	s.tasks.Wait()
	return ctx.Err()
}

// sweep drops what nobody reads, and the snapshots of lists that nobody goes on with.
func (s *Service) sweep(ctx context.Context) {
	period := 10 * time.Second // what frames take of rings grows between events
	if s.config.IdleTimeout > 0 {
		period = min(period, max(s.config.IdleTimeout/4, time.Second))
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.listServer.Sweep()
			s.converter.Sweep()
			s.logReader.Sweep()
			if dropped := s.cache.Sweep(); len(dropped) > 0 {
				slog.Info("Dropped what nobody reads", "resources", dropped)
			}
		}
	}
}

// Get answers one object's body.
func (s *Service) Get(ctx context.Context, r *watchfanoutv1.GetRequest) (*watchfanoutv1.GetResponse, error) {
	return s.listServer.Get(ctx, r)
}

// List answers a list's body.
func (s *Service) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	return s.listServer.List(r, stream)
}

// Watch streams frames until the caller goes away.
func (s *Service) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return s.watchServer.Watch(r, stream)
}

// Drain ends every watch stream, so that the gateways resume them on other replicas.
func (s *Service) Drain() { s.logReader.Drain() }
