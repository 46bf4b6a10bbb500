package watchfanout

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/process"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/watch"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Status is the state of one replica, for its status page. Revision, Behind and LagMilliseconds are of the main etcd.
type Status struct {
	Ready bool `json:"ready"`
	// Revision is the revision that the replica has applied. Behind is etcd's revision minus Revision, or -1 if
	// registry did not respond.
	Revision int64 `json:"revision"`
	Behind   int64 `json:"behind"`
	// LagMilliseconds is the time from the publisher to this replica of the newest event.
	LagMilliseconds float64 `json:"lagMilliseconds"`
	Watches         int     `json:"watches"`
	// EventsPerSecond is the recent rate of events written to streams.
	EventsPerSecond float64 `json:"eventsPerSecond"`
	Resets          int64   `json:"resets"`
	// Bytes are the bytes of objects and events in memory.
	Bytes     int            `json:"bytes"`
	Resources []cache.Status `json:"resources"`
	Slowest   []watch.Slow   `json:"slowest"`
	// Compared are the comparisons with the etcds, the main etcd's first. Only deep reports have them.
	Compared []*logreader.Comparison `json:"compared,omitempty"`
}

// state is the status in the process's report, without the queries of watches: its readers may not read the objects.
func (s *Service) state(ctx context.Context) any {
	st := s.Status(ctx)
	for i := range st.Slowest {
		st.Slowest[i].Query = ""
	}
	return st
}

// deepState is state with a comparison of the objects with etcd's. It names no objects, because the readers of a report
// may not read them.
func (s *Service) deepState(ctx context.Context) any {
	ctx, cancel := context.WithTimeout(ctx, process.DeepTimeout)
	defer cancel()
	var compared []*logreader.Comparison
	for _, l := range s.all() {
		compared = append(compared, l.logReader.CompareWithEtcd(ctx))
	}
	st := s.state(context.WithoutCancel(ctx)).(*Status)
	st.Compared = compared
	return st
}

// Status returns the replica's state. It waits at most 1 s for etcd's revision.
func (s *Service) Status(ctx context.Context) *Status {
	st := &Status{
		Ready:           s.tasks.Ready.Err() == nil,
		Revision:        s.cache.Progress(),
		Behind:          -1,
		LagMilliseconds: float64(s.cache.Lag()) / float64(time.Millisecond),
		Watches:         s.watchServer.Len(),
		EventsPerSecond: s.watchServer.Rate(),
		Resets:          s.cache.Resets(),
		Resources:       s.cache.Resources(),
		Slowest:         s.watchServer.Slowest(),
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if r, err := s.source.Revision(ctx, &registryv1.RevisionRequest{}); err == nil {
		st.Behind = max(0, r.Revision-st.Revision)
	}
	for _, l := range s.all()[1:] {
		st.Watches += l.watchServer.Len()
		st.EventsPerSecond += l.watchServer.Rate()
		st.Resets += l.cache.Resets()
		st.Resources = append(st.Resources, l.cache.Resources()...)
		st.Slowest = append(st.Slowest, l.watchServer.Slowest()...)
	}
	for _, r := range st.Resources {
		st.Bytes += r.Memory()
	}
	return st
}

// ServeHTTP writes the status page, as JSON if the Accept header contains "json", and as text otherwise. At
// logreader.DifferencesPage it writes the objects that differed from etcd's.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == logreader.DifferencesPage {
		for _, l := range s.all() {
			fmt.Fprint(w, l.logReader.Differing())
		}
		return
	}
	st := s.Status(r.Context())
	if strings.Contains(r.Header.Get("Accept"), "json") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(st)
		return
	}
	fmt.Fprintf(w, "ready %v, revision %d, %d behind etcd, newest event after %.1f ms, %d watches, %.0f events/s, "+
		"%d bytes, %d resets\n\n",
		st.Ready, st.Revision, st.Behind, st.LagMilliseconds, st.Watches, st.EventsPerSecond, st.Bytes, st.Resets)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "RESOURCE\tOBJECTS\tBYTES\tEVENTS\tEVENT BYTES\tRESUMABLE FROM\tWATCHES\tTRIGGERS\tINDEXES")
	for _, r := range st.Resources {
		objects := "-"
		if r.Loaded {
			objects = fmt.Sprint(r.Objects)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", r.Name, objects, r.Bytes, r.Events, r.EventBytes,
			r.OldestResumable, r.Watches, r.Triggers, r.Indexes)
	}
	if len(st.Slowest) > 0 {
		fmt.Fprintln(t, "\nSLOWEST WATCH\tWAITING\tREVISION\tQUERY")
		for _, x := range st.Slowest {
			fmt.Fprintf(t, "%s\t%d\t%d\t%s\n", x.Resource, x.Waiting, x.Revision, x.Query)
		}
	}
	_ = t.Flush()
}

// Collectors returns the service's metrics.
func (s *Service) Collectors() []prometheus.Collector {
	return append(append(s.collectors(), othersCollector{s}), eventlog.Metrics()...)
}

// resourceCollector reports the objects and bytes of each resource.
type resourceCollector struct{ cache *cache.Cache }

var (
	objectsDesc = prometheus.NewDesc("watershed_watchfanout_objects",
		"Cached objects, by stored resource.", []string{"resource"}, nil)
	bytesDesc = prometheus.NewDesc("watershed_watchfanout_bytes",
		"Bytes of cached objects and of recent events without compression, by stored resource.",
		[]string{"resource", "of"}, nil)
	packedDesc = prometheus.NewDesc("watershed_watchfanout_packed_bytes",
		"Bytes of unchanged objects and events that are held compressed, before compression, by stored resource.",
		[]string{"resource"}, nil)
	compressedDesc = prometheus.NewDesc("watershed_watchfanout_packed_compressed_bytes",
		"Bytes of unchanged objects and events after compression, by stored resource.", []string{"resource"}, nil)
	unpackedDesc = prometheus.NewDesc("watershed_watchfanout_unpacked_bytes",
		"Bytes that readers have lately decompressed, by stored resource.", []string{"resource"}, nil)
)

// Describe implements prometheus.Collector.
func (p *resourceCollector) Describe(c chan<- *prometheus.Desc) {
	c <- objectsDesc
	c <- bytesDesc
	c <- packedDesc
	c <- compressedDesc
	c <- unpackedDesc
}

// Collect implements prometheus.Collector.
func (p *resourceCollector) Collect(c chan<- prometheus.Metric) {
	for _, r := range p.cache.Resources() {
		gauge := func(desc *prometheus.Desc, v int, labels ...string) {
			labels = append([]string{r.Name}, labels...)
			c <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(v), labels...)
		}
		gauge(objectsDesc, r.Objects)
		gauge(bytesDesc, r.Bytes, "objects")
		gauge(bytesDesc, r.EventBytes, "events")
		gauge(packedDesc, r.PackedBytes)
		gauge(compressedDesc, r.CompressedBytes)
		gauge(unpackedDesc, r.UnpackedBytes)
	}
}
