package watchfanout

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/grpc"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

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
	config    *Config
	source    registryv1.SourceClient
	discovery *discovery.Watcher
	nats      *nats.Conn
	// etcdLog is the log of the main etcd.
	*etcdLog
	// others are the logs of the other etcds. added receives each of them once, and moved an error that ends Run.
	others atomic.Pointer[map[eventlog.LogID]*etcdLog]
	added  chan *etcdLog
	moved  chan error
	tasks  lifecycle.Supervisor
	// watches serves Watches for all logs.
	watches watch.Multiplexer
}

// addedLogs is the capacity of Service.added.
const addedLogs = 16

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
func New(c *Config, d Deps) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s := &Service{config: c, source: d.Source, added: make(chan *etcdLog, addedLogs), moved: make(chan error, 1)}
	s.watches.ServerOf, s.watches.ProgressPeriod = s.watchServerOf, c.ProgressPeriod
	s.others.Store(&map[eventlog.LogID]*etcdLog{})
	s.tasks.Ready.Set("discovery", errors.New("the registry has not sent the served resources"))
	s.discovery = &discovery.Watcher{
		Registry:    d.Discovery,
		OnChange:    s.discovered,
		AfterChange: func(*discovery.View) { s.tasks.Ready.Set("discovery", nil) },
	}
	var err error
	if s.nats, err = c.Log.Connect("watchfanout", d.ID); err != nil {
		return nil, err
	}
	s.etcdLog = s.newEtcdLog(eventlog.Main, &s.tasks.Ready)
	return s, nil
}

// Register registers the service with g.
func (s *Service) Register(g grpc.ServiceRegistrar) { watchfanoutv1.RegisterWatchServer(g, s) }

// Ready returns the conditions that keep the replica from serving: the log is behind etcd, discovery is missing, or a
// task is down.
func (s *Service) Ready() *lifecycle.Readiness { return &s.tasks.Ready }

// Run reads the logs until ctx is done. It then waits for its tasks and closes the NATS connection. It returns an error
// if a resource has moved to another etcd, so that the process ends.
func (s *Service) Run(ctx context.Context) error {
	defer s.nats.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.logReader.Run(ctx, &s.tasks)
	s.tasks.Go(ctx, "discovery", func(ctx context.Context) error {
		s.discovery.Run(ctx)
		return ctx.Err()
	})
	s.tasks.Go(ctx, "sweep", func(ctx context.Context) error {
		s.sweep(ctx)
		return ctx.Err()
	})
	var err error
	for err == nil {
		select {
		case l := <-s.added:
			l.logReader.Run(ctx, &l.own)
		case err = <-s.moved:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	cancel()
	s.tasks.Wait()
	for _, l := range s.all() {
		l.own.Wait()
	}
	return err
}

// growthPeriod is how often sweep calls PackGrowth. On two processors, ConfigMaps of 1 MB added up to 65 MB in it.
const growthPeriod = time.Second

// sweep periodically drops resources without readers, expired list snapshots, idle encodings and idle backfills. It
// packs unchanged objects, and each growthPeriod also younger objects if many bytes were written.
func (s *Service) sweep(ctx context.Context) {
	period := 10 * time.Second // frames grow the rings between events, so sweep trims them even if no resource is idle
	if s.config.IdleTimeout > 0 {
		period = min(period, max(s.config.IdleTimeout/4, time.Second))
	}
	for next := time.Now().Add(period); lifecycle.Sleep(ctx, growthPeriod) == nil; {
		due := !time.Now().Before(next)
		if due {
			next = time.Now().Add(period)
		}
		for _, l := range s.all() {
			l.cache.PackGrowth()
			if !due {
				continue
			}
			l.listServer.Sweep()
			l.converter.Sweep()
			l.logReader.Sweep()
			if dropped := l.cache.Sweep(); len(dropped) > 0 {
				slog.Info("Dropped idle resources", "resources", dropped)
			}
		}
	}
}

// List streams the body of a list.
func (s *Service) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	l, err := s.listLog(r.GetQuery().GetResource())
	if err != nil {
		return err
	}
	return l.listServer.List(r, stream)
}

// Watch streams frames until the caller cancels.
func (s *Service) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	l, err := s.watchLog(r.GetQuery().GetResource())
	if err != nil {
		return err
	}
	return l.watchServer.Watch(r, stream)
}

// Watches streams the frames of many watches until the caller cancels.
func (s *Service) Watches(
	stream grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]) error {
	return s.watches.Watches(stream)
}

func (s *Service) watchServerOf(r *commonv1.Resource) (*watch.Server, error) {
	l, err := s.watchLog(r)
	if err != nil {
		return nil, err
	}
	return l.watchServer, nil
}

// Drain ends every watch stream, so that the gateways resume the watches on other replicas.
func (s *Service) Drain() {
	for _, l := range s.all() {
		l.watchServer.Drain()
	}
	s.watches.Drain()
}
