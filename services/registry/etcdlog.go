package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/telemetry"
	watchcache "watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/logreader"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/storage"
)

const (
	// watchCacheBytes bounds the events in the watch cache of a log.
	watchCacheBytes = 8 << 20
	// staleAfter is how long the log may not advance while etcd has more. Watches then move to another registry.
	staleAfter = 3 * time.Second
)

// inconsistencies counts the differences of the watch caches.
var inconsistencies = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_inconsistencies_total",
	Help: "Times that the events in registry's watch cache differed from the publisher's sums.",
}, []string{"resource"})

// etcdLog is the event log of an etcd.
type etcdLog struct {
	service *Service
	etcd    *storage.Etcd
	options eventlog.Options
	// publisher writes the log while this replica is elected.
	publisher *publisher.Publisher
	// watchCache holds the newest events of the log, which logReader reads.
	watchCache *watchcache.Cache
	logReader  *logreader.Reader
	// inEpoch is closed when this registry has read the log of etcd's epoch, and late is closed staleAfter the start.
	inEpoch, late chan struct{}
	// tasks of another log than the main log do not affect the readiness of the registry.
	tasks lifecycle.Supervisor
}

// newEtcdLog returns the log of an etcd. It returns an error if --log-end-dir cannot be used.
func (s *Service) newEtcdLog(etcd *storage.Etcd) (*etcdLog, error) {
	l := &etcdLog{
		service:    s,
		etcd:       etcd,
		options:    s.config.Log,
		watchCache: watchcache.NewEvents(watchCacheBytes),
		inEpoch:    make(chan struct{}),
		late:       make(chan struct{}),
	}
	l.options.ID = etcd.Log
	l.options.Owner = etcd.OwnKey(publisher.KeyPrefix(l.options.Name, etcd.Log))
	l.publisher = &publisher.Publisher{
		Storage:            s.resources.Storage,
		Etcd:               etcd,
		Log:                &l.options,
		NATS:               s.nats,
		JS:                 s.js,
		Identity:           s.identity,
		DataKeys:           s.dataKeys,
		CompactionInterval: s.config.Storage.CompactionInterval,
	}
	if dir := s.config.LogEndDir; dir != "" {
		if err := l.publisher.KeepEnd(dir); err != nil {
			return nil, fmt.Errorf("--log-end-dir %q: %w", dir, err)
		}
	}
	if telemetry.TracingEnabled() {
		etcd.PublishTraceContexts(l.publisher.PublishTraceContext)
	}
	l.logReader = logreader.New(l.watchCache, s.nats, logreader.Source{
		Stream: eventlog.DirectGetReader{JS: s.js, Log: etcd.Log},
		Keys: func(ctx context.Context, storageResource, key string) ([]byte, error) {
			return s.source.ReadDataKey(ctx, etcd.Log, storageResource, key)
		},
		Revision: func(ctx context.Context) (int64, error) {
			return s.source.CurrentRevision(ctx, etcd)
		},
	}, &lifecycle.Readiness{}, logreader.Config{
		Log:         etcd.Log,
		StaleAfter:  staleAfter,
		OnEvent:     l.beforeApply,
		Differences: inconsistencies,
	})
	return l, nil
}

// beforeApply records an event as read, and updates the caches of objects. The watch cache applies it afterwards.
func (l *etcdLog) beforeApply(e *logv1.Event) {
	l.publisher.Observe(e)
	resources := l.service.resources
	// Revisions before and after a change of epoch cannot be compared.
	if epoch := l.watchCache.Epoch(); e.Epoch != "" && epoch != "" && e.Epoch != epoch {
		if l.etcd.Log == eventlog.Main {
			resources.Custom.EpochChanged()
		}
		resources.Storage.ClearCaches()
	}
	resources.Storage.Invalidate(e)
}

// run starts the tasks of the log. main are the tasks of the main log.
func (l *etcdLog) run(ctx context.Context, main *lifecycle.Supervisor) {
	tasks := main
	if l.etcd.Log != eventlog.Main {
		tasks = &l.tasks
		slog.Info("Resources of another etcd", "servers", l.etcd.Servers, "log", l.etcd.Log)
	}
	tasks.Go(ctx, "publisher", l.publisher.Run)
	l.logReader.Run(ctx, tasks)
	time.AfterFunc(staleAfter, func() { close(l.late) })
	tasks.Go(ctx, "epoch", l.checkEpoch)
}

// minEpochPause and maxEpochPause bound the pauses of checkEpoch, which double.
const (
	minEpochPause = 10 * time.Millisecond
	maxEpochPause = time.Second
)

// checkEpoch closes inEpoch when this registry has read the log of etcd's epoch to its end.
func (l *etcdLog) checkEpoch(ctx context.Context) error {
	began, warned := time.Now(), false
	for pause := minEpochPause; ctx.Err() == nil; pause = min(2*pause, maxEpochPause) {
		last, _, _, err := l.options.ID.Last(ctx, l.service.js)
		_ = lifecycle.Sleep(ctx, pause) // meanwhile the reader of the log reads up to last
		epoch := ""
		if err == nil {
			epoch, err = l.publisher.InEpoch(ctx, last.Revision)
		}
		if err == nil && epoch == l.watchCache.Epoch() { // the watch cache applies an event after it is observed
			l.publisher.ReplaceEnd()
			close(l.inEpoch)
			break
		}
		if err == nil {
			err = fmt.Errorf("it has read the log of epoch %q, and etcd's is %q", l.watchCache.Epoch(), epoch)
		}
		if !warned && time.Since(began) > staleAfter {
			slog.Warn("Registry has not read the log of etcd's epoch yet", "log", l.etcd.Log, "reason", err)
			warned = true
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// awaitEpoch waits until this registry has read the log of etcd's epoch to its end, once after its start. It returns an
// UNAVAILABLE error if that takes more than staleAfter. The events of an earlier etcd could grant permissions, and hide
// that upstream's controllers must create their objects again.
func (l *etcdLog) awaitEpoch(ctx context.Context) error {
	select {
	case <-l.inEpoch:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-l.late:
	}
	select {
	case <-l.inEpoch:
		return nil
	default:
		return status.Error(codes.Unavailable, "the event log of etcd's epoch has not been read yet")
	}
}
