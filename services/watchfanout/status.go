package watchfanout

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/watch"
)

// Status is what an operator sees of one replica.
type Status struct {
	Ready bool `json:"ready"`
	// Revision is how far the replica has come; Behind is how many revisions etcd is ahead of it, -1 where nobody says.
	Revision int64 `json:"revision"`
	Behind   int64 `json:"behind"`
	// LagMilliseconds is how long the newest event took from the publisher to here.
	LagMilliseconds float64 `json:"lagMilliseconds"`
	Watches         int     `json:"watches"`
	// EventsPerSecond is what was written to streams during the last seconds.
	EventsPerSecond float64        `json:"eventsPerSecond"`
	Resets          int64          `json:"resets"`
	Bytes           int            `json:"bytes"`
	Resources       []cache.Status `json:"resources"`
	Slowest         []watch.Slow   `json:"slowest"`
}

// maxSlowest is how many watches a status names.
const maxSlowest = 10

// Status asks the replica.
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
		Slowest:         s.watchServer.Slowest(maxSlowest),
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if r, err := s.source.Revision(ctx, &registryv1.RevisionRequest{}); err == nil {
		st.Behind = max(0, r.Revision-st.Revision)
	}
	for _, r := range st.Resources {
		st.Bytes += r.Bytes + r.EventBytes
	}
	return st
}

// ServeHTTP is the replica's page: what it holds, as text or, for who accepts it, JSON.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

// Collectors are the service's metrics.
func (s *Service) Collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "watershed_watchfanout_" + name, Help: help}, f)
	}
	collectors := []prometheus.Collector{
		&resourceCollector{s.cache},
		gauge("revision", "The revision that the replica has reached.", func() float64 {
			return float64(s.cache.Progress())
		}),
		gauge("event_lag_seconds", "How long the newest event took from the publisher to this replica.",
			func() float64 {
				return s.cache.Lag().Seconds()
			}),
		gauge("resets", "Times that something had to be forgotten because the log had a gap or held what could not "+
			"be read.", func() float64 {
			return float64(s.cache.Resets())
		}),
	}
	return slices.Concat(
		collectors,
		s.logReader.Metrics(),
		s.listServer.Metrics(),
		s.converter.Metrics(),
		s.watchServer.Metrics(),
	)
}

// resourceCollector tells what each resource takes.
type resourceCollector struct{ cache *cache.Cache }

var (
	objectsDesc = prometheus.NewDesc("watershed_watchfanout_objects",
		"Objects held, by stored resource.", []string{"resource"}, nil)
	bytesDesc = prometheus.NewDesc("watershed_watchfanout_bytes",
		"Bytes of objects and of recent events held, by stored resource.", []string{"resource", "of"}, nil)
)

// Describe implements prometheus.Collector.
func (p *resourceCollector) Describe(c chan<- *prometheus.Desc) { c <- objectsDesc; c <- bytesDesc }

// Collect implements prometheus.Collector.
func (p *resourceCollector) Collect(c chan<- prometheus.Metric) {
	for _, r := range p.cache.Resources() {
		c <- prometheus.MustNewConstMetric(objectsDesc, prometheus.GaugeValue, float64(r.Objects), r.Name)
		c <- prometheus.MustNewConstMetric(bytesDesc, prometheus.GaugeValue, float64(r.Bytes), r.Name, "objects")
		c <- prometheus.MustNewConstMetric(bytesDesc, prometheus.GaugeValue, float64(r.EventBytes), r.Name, "events")
	}
}
