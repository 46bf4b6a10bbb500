// Package watchfanout serves LIST and WATCH from encoded bytes. A replica reads the event log, keeps the objects of the
// resources that are asked for, and writes answers without ever decoding an object. It calls registry alone: for a
// first snapshot, for the current revision, and for what its bytes are not (another version, Table rows).
package watchfanout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// Config is what a replica is told.
type Config struct {
	Log            eventlog.Options
	RingBytes      int
	ProgressPeriod time.Duration
	// IdleAfter is how long a resource that nobody reads is kept in memory.
	IdleAfter time.Duration
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Log.AddFlags(fs)
	fs.IntVar(&c.RingBytes, "watch-ring-bytes", 32<<20, "How many bytes of recent events are kept in memory for each resource.")
	fs.DurationVar(&c.IdleAfter, "cache-idle-timeout", 10*time.Minute, "How long the objects of a resource that nobody lists or watches stay in memory; they are read again on demand. 0: for ever.")
	fs.DurationVar(&c.ProgressPeriod, "watch-progress-period", 2*time.Second, "How often a stream is told how far it has come: the bookmarks that gateways pass on when they are due.")
}

// Service is one replica.
type Service struct {
	watchfanoutv1.UnimplementedWatchServer
	config   *Config
	registry registryv1.SourceClient
	nats     *nats.Conn
	js       jetstream.JetStream
	cache    *cache.Cache
	caughtUp atomic.Bool
	metrics  *metrics

	snapshotsMu sync.Mutex
	snapshots   []keptSnapshot
	asking      atomic.Int64
	// stalled is when a read last waited for etcd's revision in vain, in nanoseconds since 1970; 0: none has since one did
	// not.
	stalled   atomic.Int64
	draining  chan struct{}
	drainOnce sync.Once
	freshness freshness
	tasks     lifecycle.Supervisor
	backfills backfills
	// pieces is what watches hold of backfills while their clients take it, in bytes.
	pieces atomic.Int64

	rows, versions encodings

	watchersMu sync.Mutex
	watchers   map[*watcher]struct{}
	rate       rate
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{} }

// Deps is what a replica is built with.
type Deps struct {
	// ID is its identity on the inner network.
	ID     rpc.TLS
	Source registryv1.SourceClient
}

// New builds a replica. It begins to serve when it has read the log to its end.
func New(_ context.Context, c *Config, d Deps) (*Service, error) {
	s := &Service{config: c, registry: d.Source, cache: cache.New(c.RingBytes, c.IdleAfter), draining: make(chan struct{}), backfills: newBackfills(), watchers: map[*watcher]struct{}{},
		rows: encodings{life: rowsLife, limit: encodingsSize}, versions: encodings{life: versionsLife, limit: encodingsSize}}
	var err error
	if s.nats, s.js, err = c.Log.Connect("watchfanout", d.ID); err != nil {
		return nil, err
	}
	s.metrics = newMetrics(s)
	return s, nil
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { watchfanoutv1.RegisterWatchServer(g, s) }

// Ready says why the replica cannot serve yet, or nil.
func (s *Service) Ready(context.Context) error {
	if !s.caughtUp.Load() {
		return errors.New("still reading the event log")
	}
	if err := s.tasks.Down(); err != nil {
		return err
	}
	return s.freshness.err()
}

// Run reads the log until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	defer s.nats.Close()
	s.tasks.Go(ctx, "catch up", func(ctx context.Context) error {
		s.catchUp(ctx)
		return s.verify(ctx)
	})
	s.tasks.Go(ctx, "sweep", func(ctx context.Context) error {
		s.sweep(ctx)
		return ctx.Err()
	})
	s.tasks.Go(ctx, "log", func(ctx context.Context) error { return eventlog.Read(ctx, s.js, s.apply) })
	<-ctx.Done()
	s.tasks.Wait()
	return ctx.Err()
}

// apply takes the log's next message. One that breaks what holds it is forgotten with its resource, which readers bring
// back.
func (s *Service) apply(e *logv1.Event) error {
	began := time.Now()
	defer func() {
		if r := recover(); r != nil {
			slog.Error("A message of the log cannot be applied; its resource is read anew", "resource", e.StoredAs, "revision", e.Revision, "panic", r, "stack", string(debug.Stack()))
			s.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: e.Revision, StoredAs: e.StoredAs})
		}
	}()
	s.cache.Apply(e)
	telemetry.FollowEvent(e.Trace, "apply", began).End()
	return nil
}

// catchUp waits until the replica has reached what etcd had when it started.
func (s *Service) catchUp(ctx context.Context) {
	for ctx.Err() == nil {
		r, err := s.registry.Revision(ctx, &registryv1.RevisionRequest{})
		if err == nil {
			if err = s.wait(ctx, r.Revision); err == nil {
				s.caughtUp.Store(true)
				slog.Info("The event log is read to its end", "revision", r.Revision)
				return
			}
		}
		if ctx.Err() == nil {
			slog.Warn("Not caught up yet", "error", err)
			time.Sleep(200 * time.Millisecond)
		}
	}
}

// sweep drops what nobody reads, and the snapshots of lists that nobody goes on with.
func (s *Service) sweep(ctx context.Context) {
	period := 10 * time.Second // what frames take of rings grows between events
	if s.config.IdleAfter > 0 {
		period = min(period, max(s.config.IdleAfter/4, time.Second))
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.release()
			s.backfills.sweep()
			if dropped := s.cache.Sweep(); len(dropped) > 0 {
				slog.Info("Dropped what nobody reads", "resources", dropped)
			}
		}
	}
}

// askAfter is how long a reader gives the log to move by itself before it asks how far it is.
const askAfter = 2 * time.Millisecond

// wait waits until the replica has reached revision. When nothing happens in what is stored, the publisher has to be
// asked to say so.
func (s *Service) wait(ctx context.Context, revision int64) error {
	pause := askAfter
	return s.cache.Wait(ctx, revision, func(ctx context.Context, advanced <-chan struct{}) {
		t := time.NewTimer(pause)
		defer t.Stop()
		select {
		case <-advanced:
		case <-ctx.Done():
		case <-t.C:
			now := time.Now().UnixNano()
			if last := s.asking.Load(); now-last > int64(askAfter) && s.asking.CompareAndSwap(last, now) {
				_ = s.nats.Publish(eventlog.AskProgress, nil)
			}
			pause = min(pause*2, 100*time.Millisecond)
		}
	})
}

// current is etcd's revision now, reached by the replica: what a consistent read needs.
func (s *Service) current(ctx context.Context) error {
	r, err := s.registry.Revision(ctx, &registryv1.RevisionRequest{})
	if err != nil {
		return err
	}
	return s.wait(ctx, r.Revision)
}

// source reads a whole resource from registry.
func (s *Service) source(ctx context.Context, storedAs string) ([]*registryv1.Row, int64, error) {
	stream, err := s.registry.Snapshot(ctx, &registryv1.SnapshotRequest{StoredAs: storedAs})
	if err != nil {
		return nil, 0, err
	}
	var rows []*registryv1.Row
	var revision int64
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slog.Debug("Loaded", "resource", storedAs, "objects", len(rows), "revision", revision)
			return rows, revision, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("snapshot of %s: %w", storedAs, err)
		}
		revision = chunk.Revision
		rows = append(rows, chunk.Rows...)
	}
}

// Drain ends every watch stream, so that the gateways resume them on other replicas.
func (s *Service) Drain() { s.drainOnce.Do(func() { close(s.draining) }) }
