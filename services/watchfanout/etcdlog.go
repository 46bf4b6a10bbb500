package watchfanout

import (
	"fmt"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/list"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// etcdLog serves the resources of an etcd from its event log. The revisions of two etcds cannot be compared, so each
// has a cache, a reader and servers of its own.
type etcdLog struct {
	id          eventlog.LogID
	cache       *cache.Cache
	converter   *conversion.Converter
	logReader   *logreader.Reader
	differences *prometheus.CounterVec
	listServer  *list.Server
	watchServer *watch.Server
	// own are the tasks and the readiness of another log than the main log. They do not affect the replica's readiness.
	own lifecycle.Supervisor
}

// newEtcdLog returns the servers of a log. ready is not ready while the log is behind its etcd.
func (s *Service) newEtcdLog(id eventlog.LogID, ready *lifecycle.Readiness) *etcdLog {
	l := &etcdLog{
		id:    id,
		cache: cache.New(s.config.RingBytes, s.config.IdleTimeout),
		differences: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_inconsistencies_total",
			Help: "Times that cached objects or events differed from the publisher's sums, or objects from etcd. The " +
				"log names the objects.",
		}, []string{"resource"}),
	}
	if ready == nil {
		ready = &l.own.Ready
	}
	l.converter = conversion.New(conversion.Remote(s.source), l.cache, conversion.CacheBytes)
	l.logReader = logreader.New(l.cache, s.nats, logreader.Remote(s.source, id), ready,
		logreader.Config{Log: id, StaleAfter: staleAfter, Backfills: true, Differences: l.differences})
	l.listServer = list.New(s.discovery, l.cache, l.logReader, l.converter, s.config.CompressedBytes)
	l.watchServer = watch.New(watch.Options{
		Objects:        &watch.Cached{Discovery: s.discovery, Cache: l.cache, LogReader: l.logReader},
		Cache:          l.cache,
		LogReader:      l.logReader,
		Converter:      l.converter,
		ProgressPeriod: s.config.ProgressPeriod,
	})
	return l
}

// discovered adds the logs of a new view. If a resource has another log than before, the replica ends: its caches and
// open watches are of another etcd.
func (s *Service) discovered(v *discovery.View) {
	if old := s.discovery.View(); old != nil {
		for _, e := range v.Resources {
			r := e.Resource
			before, ok := old.APIResource(r.Group, r.Version, r.Resource, r.Subresource)
			if ok && before.Log != e.Log {
				select {
				case s.moved <- fmt.Errorf("registry has moved %s to another etcd", e.StorageResource):
				default:
				}
			}
		}
	}
	others := maps.Clone(*s.others.Load())
	for _, log := range v.Logs {
		id := eventlog.LogID(log)
		if others[id] == nil {
			others[id] = s.newEtcdLog(id, nil)
			s.added <- others[id]
		}
	}
	s.others.Store(&others)
}

// all returns all logs, the main log first.
func (s *Service) all() []*etcdLog {
	logs := []*etcdLog{s.etcdLog}
	others := *s.others.Load()
	for _, id := range slices.Sorted(maps.Keys(others)) {
		logs = append(logs, others[id])
	}
	return logs
}

// logOf returns the log of a resource. It fails if the resource's log is unknown, or not read to its end yet.
func (s *Service) logOf(r *commonv1.Resource) (*etcdLog, error) {
	v := s.discovery.View()
	if v == nil {
		return nil, query.ErrNotDiscovered
	}
	e, ok := v.APIResource(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())
	if !ok || e.Log == "" {
		return s.etcdLog, nil
	}
	l := (*s.others.Load())[eventlog.LogID(e.Log)]
	if l == nil {
		return nil, query.ErrNotDiscovered
	}
	return l, l.own.Ready.Err()
}

// listLog returns the log for a list, or rpc.ErrDelegate.
func (s *Service) listLog(r *commonv1.Resource) (*etcdLog, error) {
	l, err := s.logOf(r)
	if err != nil {
		return nil, rpc.ErrDelegate
	}
	return l, nil
}

// watchLog returns the log for a watch, or an UNAVAILABLE error.
func (s *Service) watchLog(r *commonv1.Resource) (*etcdLog, error) {
	l, err := s.logOf(r)
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return l, nil
}

// collectors returns the metrics of the log.
func (l *etcdLog) collectors() []prometheus.Collector {
	return slices.Concat([]prometheus.Collector{
		l.differences,
		&resourceCollector{l.cache},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "watershed_watchfanout_revision",
			Help: "The revision of etcd that the replica has reached.",
		}, func() float64 { return float64(l.cache.Progress()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "watershed_watchfanout_event_lag_seconds",
			Help: "Time in seconds from the publisher to this replica of the newest event, by the clocks of both hosts.",
		}, func() float64 { return l.cache.Lag().Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "watershed_watchfanout_resets",
			Help: "Resets of a resource or of the cache: the log had a gap or an unreadable message.",
		}, func() float64 { return float64(l.cache.Resets()) }),
	}, l.logReader.Metrics(), l.listServer.Metrics(), l.converter.Metrics(), l.watchServer.Metrics())
}

// othersCollector reports the metrics of the other logs with the label log. Which logs there are is unknown when it is
// registered, so it describes no metric.
type othersCollector struct{ service *Service }

// Describe implements prometheus.Collector.
func (othersCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (o othersCollector) Collect(c chan<- prometheus.Metric) {
	for _, l := range o.service.all()[1:] {
		for _, m := range l.collectors() {
			prometheus.WrapCollectorWith(prometheus.Labels{"log": string(l.id)}, m).Collect(c)
		}
	}
}
