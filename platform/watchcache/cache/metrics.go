package cache

import (
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
)

// counters are upstream's metrics of a resource in the watch cache. A lookup by labels takes longer than a count, so
// they are resolved once for many events.
type counters struct {
	groupResource                              schema.GroupResource
	received, dispatched, initialEvents, loads metrics.CounterMetric
	consistent, fallbacks                      metrics.CounterMetric
	readWait                                   metrics.ObserverMetric
}

// metrics returns the resource's counters. It returns nil for a cache of events only, which serves no clients.
func (r *Resource) metrics() *counters {
	if r.cache.eventsOnly {
		return nil
	}
	if c := r.counters.Load(); c != nil {
		return c
	}
	c := newCounters(r.Name)
	r.counters.Store(c)
	return c
}

func newCounters(storageResource string) *counters {
	gr := schema.ParseGroupResource(storageResource)
	consistentReads := func(fallback bool) metrics.CounterMetric {
		// The outcome of a fallback is unknown here: registry serves the read.
		return cachermetrics.ConsistentReadTotal.WithLabelValues(gr.Group, gr.Resource, "true",
			strconv.FormatBool(fallback))
	}
	return &counters{
		groupResource: gr,
		received:      cachermetrics.EventsReceivedCounter.WithLabelValues(gr.Group, gr.Resource),
		dispatched:    cachermetrics.EventsCounter.WithLabelValues(gr.Group, gr.Resource),
		initialEvents: cachermetrics.InitCounter.WithLabelValues(gr.Group, gr.Resource),
		loads:         cachermetrics.WatchCacheInitializations.WithLabelValues(gr.Group, gr.Resource),
		consistent:    consistentReads(false),
		fallbacks:     consistentReads(true),
		readWait:      cachermetrics.WatchCacheReadWait.WithLabelValues(gr.Group, gr.Resource),
	}
}

// CountInitialEvents counts the initial events of a watch.
func (r *Resource) CountInitialEvents(n int) {
	if c := r.metrics(); c != nil {
		c.initialEvents.Add(float64(n))
	}
}

// CountList counts a list: the index that found its objects, or "", and the numbers of objects read and returned.
func (r *Resource) CountList(index string, read, returned int) {
	c := r.metrics()
	if c == nil {
		return
	}
	if index != "" {
		index = "f:" + index // as upstream's indexes of a field are called
	}
	cachermetrics.RecordListCacheMetrics(c.groupResource, index, read, returned)
}

// CountConsistentRead counts a read at etcd's current revision. The read falls back to registry if the cache did not
// reach the revision in time.
func (r *Resource) CountConsistentRead(fallback bool) {
	switch c := r.metrics(); {
	case c == nil:
	case fallback:
		c.fallbacks.Inc()
	default:
		c.consistent.Inc()
	}
}

// ObserveReadWait records how long a read has waited for a revision.
func (r *Resource) ObserveReadWait(since time.Time) {
	if c := r.metrics(); c != nil {
		c.readWait.Observe(time.Since(since).Seconds())
	}
}

// RecordRevisions records the revision of every loaded resource. It drops the resolved counters, because DELETE
// /metrics replaces upstream's.
func (c *Cache) RecordRevisions() {
	progress := c.Progress()
	c.each(func(r *Resource) {
		r.counters.Store(nil)
		r.mu.Lock()
		loaded := r.tree != nil
		r.mu.Unlock()
		if loaded && !c.eventsOnly {
			cachermetrics.RecordResourceVersion(r.metrics().groupResource, uint64(progress))
		}
	})
}
