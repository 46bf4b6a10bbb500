package watchfanout

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/config"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/list"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/watch"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Config is the configuration of a replica.
type Config struct {
	Log            eventlog.Options
	RingBytes      int
	ProgressPeriod time.Duration
	// IdleTimeout is how long a resource without readers stays in memory; 0 is forever.
	IdleTimeout time.Duration
	// CompressedBytes bounds the cached compressed runs of lists, in bytes; 0 disables compression in the replica.
	CompressedBytes int
}

// AddFlags adds every option to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Log.AddFlags(fs)
	fs.IntVar(&c.RingBytes, "watch-ring-bytes", 32<<20,
		"Bytes of recent events cached for each resource.")
	fs.IntVar(&c.CompressedBytes, "compressed-lists-bytes", 64<<20,
		"Bytes of compressed lists cached for clients that accept gzip: unchanged parts are compressed only "+
			"once. 0: the gateways compress each list.")
	fs.DurationVar(&c.IdleTimeout, "cache-idle-timeout", 10*time.Minute,
		"How long the objects of a resource without lists or watches stay in memory; the next list or watch "+
			"reads them again. 0: forever.")
	fs.DurationVar(&c.ProgressPeriod, "watch-progress-period", 2*time.Second,
		"How often a replica sends its revision on a stream: the gateways' source of bookmarks.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	return errors.Join(
		c.Log.Validate(),
		config.AtLeast("watch-ring-bytes", c.RingBytes, 1),
		config.AtLeast("compressed-lists-bytes", c.CompressedBytes, 0),
		config.AtLeast("cache-idle-timeout", c.IdleTimeout, 0),
		config.AtLeast("watch-progress-period", c.ProgressPeriod, time.Millisecond),
	)
}

// Service is one replica. Its readiness:
//
//	starting ── discovery received, log read to etcd's revision ──► ready
//	ready ───── log 4 s behind etcd and not advancing ────────────► stale
//	stale ───── log caught up ────────────────────────────────────► ready
//	any ─────── Drain (SIGTERM) ──────────────────────────────────► draining
//
// A stale replica rejects new calls with UNAVAILABLE and ends its streams at their next bookmark. A draining replica
// ends every stream at once.
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

// NewConfig returns an empty configuration; AddFlags sets the defaults.
func NewConfig() *Config { return &Config{} }

// Deps are the clients and the identity that New needs.
type Deps struct {
	// ID is the replica's identity on the internal network.
	ID        rpc.TLS
	Source    registryv1.SourceClient
	Discovery registryv1.DiscoveryClient
}

// staleAfter is how long the log may lack etcd's events and not advance before the replica is stale.
const staleAfter = 4 * time.Second

// New builds a replica. Run starts it; it becomes ready when it has received discovery and has read the log to its end.
func New(_ context.Context, c *Config, d Deps) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s := &Service{config: c, source: d.Source, cache: cache.New(c.RingBytes, c.IdleTimeout)}
	s.tasks.Ready.Set("discovery", errors.New("the registry has not sent the served resources"))
	s.discovery = &discovery.Watcher{
		Registry: d.Discovery,
		OnChange: func(*discovery.View) { s.tasks.Ready.Set("discovery", nil) },
	}
	var err error
	if s.nats, err = c.Log.Connect("watchfanout", d.ID); err != nil {
		return nil, err
	}
	s.converter = conversion.New(conversion.Remote(d.Source), s.cache, conversion.CacheBytes)
	s.logReader = logreader.New(s.cache, s.nats, logreader.Remote(d.Source), &s.tasks.Ready,
		logreader.Config{StaleAfter: staleAfter, Backfills: true})
	s.listServer = list.New(s.discovery, s.cache, s.logReader, s.converter, c.CompressedBytes)
	s.watchServer = watch.New(watch.Options{
		Objects:        &watch.Cached{Discovery: s.discovery, Cache: s.cache, LogReader: s.logReader},
		Cache:          s.cache,
		LogReader:      s.logReader,
		Converter:      s.converter,
		ProgressPeriod: c.ProgressPeriod,
	})
	return s, nil
}

// Register registers the service with g.
func (s *Service) Register(g grpc.ServiceRegistrar) { watchfanoutv1.RegisterWatchServer(g, s) }

// Ready returns the conditions that keep the replica from serving: the log is behind etcd, discovery is missing, or a
// task is down.
func (s *Service) Ready() *lifecycle.Readiness { return &s.tasks.Ready }

// Run reads the log until ctx is done. It then waits for its tasks and closes the NATS connection.
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

// sweep periodically drops resources without readers, expired list snapshots, idle encodings and idle backfills.
func (s *Service) sweep(ctx context.Context) {
	period := 10 * time.Second // frames grow the rings between events, so sweep trims them even if no resource is idle
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
				slog.Info("Dropped idle resources", "resources", dropped)
			}
		}
	}
}

// List streams the body of a list.
func (s *Service) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	return s.listServer.List(r, stream)
}

// Watch streams frames until the caller cancels.
func (s *Service) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return s.watchServer.Watch(r, stream)
}

// Drain ends every watch stream, so that the gateways resume the watches on other replicas.
func (s *Service) Drain() { s.watchServer.Drain() }
