package watchfanout

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/frame"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
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
	Slowest         []Slow         `json:"slowest"`
}

// Slow is a watch for which events wait.
type Slow struct {
	Resource string `json:"resource"`
	Query    string `json:"query"`
	Revision int64  `json:"revision"`
	Waiting  int64  `json:"waiting"`
}

// slowest is how many watches a status names.
const slowest = 10

// Status asks the replica.
func (s *Service) Status(ctx context.Context) *Status {
	st := &Status{Ready: s.caughtUp.Load(), Revision: s.cache.Progress(), Behind: -1, LagMilliseconds: float64(s.cache.Lag()) / float64(time.Millisecond),
		Resets: s.cache.Resets(), Resources: s.cache.Resources(), EventsPerSecond: s.rate.now()}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if r, err := s.registry.Revision(ctx, &registryv1.RevisionRequest{}); err == nil {
		st.Behind = max(0, r.Revision-st.Revision)
	}
	for _, r := range st.Resources {
		st.Bytes += r.Bytes + r.EventBytes
	}
	s.watchersMu.Lock()
	st.Watches = len(s.watchers)
	for w := range s.watchers {
		if n := w.events.Behind(cache.Cursor(w.at.Load())); n > 0 {
			st.Slowest = append(st.Slowest, Slow{w.entry.StoredAs, w.describe(), w.sent.Load(), n})
		}
	}
	s.watchersMu.Unlock()
	slices.SortFunc(st.Slowest, func(a, b Slow) int { return cmp.Compare(b.Waiting, a.Waiting) })
	st.Slowest = st.Slowest[:min(len(st.Slowest), slowest)]
	return st
}

// describe names what a watch selects, for people.
func (q *query) describe() string {
	var parts []string
	for _, p := range [][2]string{{"namespace", q.namespace}, {"labels", q.labels.String()}, {"fields", q.fields.String()}, {"as", q.as.GetKind()}, {"version", frame.APIVersion(q.entry.Kind)}} {
		if p[1] != "" {
			parts = append(parts, p[0]+"="+p[1])
		}
	}
	return strings.Join(parts, " ")
}

// ServeHTTP is the replica's page: what it holds, as text or, for who accepts it, JSON.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	st := s.Status(r.Context())
	if strings.Contains(r.Header.Get("Accept"), "json") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(st)
		return
	}
	fmt.Fprintf(w, "ready %v, revision %d, %d behind etcd, newest event after %.1f ms, %d watches, %.0f events/s, %d bytes, %d resets\n\n",
		st.Ready, st.Revision, st.Behind, st.LagMilliseconds, st.Watches, st.EventsPerSecond, st.Bytes, st.Resets)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "RESOURCE\tOBJECTS\tBYTES\tEVENTS\tEVENT BYTES\tRESUMABLE FROM\tWATCHES\tTOPICS\tINDEXES")
	for _, r := range st.Resources {
		objects := "-"
		if r.Loaded {
			objects = fmt.Sprint(r.Objects)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", r.Name, objects, r.Bytes, r.Events, r.EventBytes, r.OldestResumable, r.Watches, r.Topics, r.Indexes)
	}
	if len(st.Slowest) > 0 {
		fmt.Fprintln(t, "\nSLOWEST WATCH\tWAITING\tREVISION\tQUERY")
		for _, x := range st.Slowest {
			fmt.Fprintf(t, "%s\t%d\t%d\t%s\n", x.Resource, x.Waiting, x.Revision, x.Query)
		}
	}
	_ = t.Flush()
}

// open adds a watch to those that a status tells of, until the answered function is called.
func (s *Service) open(w *watcher) func() {
	s.watchersMu.Lock()
	s.watchers[w] = struct{}{}
	s.watchersMu.Unlock()
	return func() {
		s.watchersMu.Lock()
		delete(s.watchers, w)
		s.watchersMu.Unlock()
	}
}

// rate counts per second, over the last window.
type rate struct {
	count atomic.Int64

	mu    sync.Mutex
	at    time.Time
	from  int64
	value float64
}

const rateWindow = 5 * time.Second

func (r *rate) now() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, since := r.count.Load(), time.Since(r.at)
	switch {
	case r.at.IsZero():
		r.at, r.from = time.Now(), n
	case since >= time.Second:
		r.value = float64(n-r.from) / since.Seconds()
		if since >= rateWindow {
			r.at, r.from = time.Now(), n
		}
	}
	return r.value
}

type metrics struct {
	delivered, lists *prometheus.CounterVec
	replays          prometheus.Counter
	all              []prometheus.Collector
}

func newMetrics(s *Service) *metrics {
	m := &metrics{
		delivered: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "watershed_watchfanout_events_delivered_total", Help: "Watch events written to streams, by stored resource."}, []string{"resource"}),
		lists:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "watershed_watchfanout_lists_total", Help: "Lists answered, by stored resource."}, []string{"resource"}),
	}
	m.replays = prometheus.NewCounter(prometheus.CounterOpts{Name: "watershed_watchfanout_replays_total", Help: "Watches resumed from further back than memory goes, out of the log."})
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "watershed_watchfanout_" + name, Help: help}, f)
	}
	m.all = []prometheus.Collector{m.delivered, m.lists, m.replays, &perResource{s},
		gauge("revision", "The revision that the replica has reached.", func() float64 { return float64(s.cache.Progress()) }),
		gauge("event_lag_seconds", "How long the newest event took from the publisher to this replica.", func() float64 { return s.cache.Lag().Seconds() }),
		gauge("resets", "Times that something had to be forgotten because the log had a gap or held what could not be read.", func() float64 { return float64(s.cache.Resets()) }),
		gauge("watchers", "Open watch streams.", func() float64 {
			s.watchersMu.Lock()
			defer s.watchersMu.Unlock()
			return float64(len(s.watchers))
		})}
	return m
}

// Collectors are the service's metrics.
func (s *Service) Collectors() []prometheus.Collector { return s.metrics.all }

// perResource tells what each resource takes.
type perResource struct{ *Service }

var (
	objectsDesc = prometheus.NewDesc("watershed_watchfanout_objects", "Objects held, by stored resource.", []string{"resource"}, nil)
	bytesDesc   = prometheus.NewDesc("watershed_watchfanout_bytes", "Bytes of objects and of recent events held, by stored resource.", []string{"resource", "of"}, nil)
)

// Describe implements prometheus.Collector.
func (p *perResource) Describe(c chan<- *prometheus.Desc) { c <- objectsDesc; c <- bytesDesc }

// Collect implements prometheus.Collector.
func (p *perResource) Collect(c chan<- prometheus.Metric) {
	for _, r := range p.cache.Resources() {
		c <- prometheus.MustNewConstMetric(objectsDesc, prometheus.GaugeValue, float64(r.Objects), r.Name)
		c <- prometheus.MustNewConstMetric(bytesDesc, prometheus.GaugeValue, float64(r.Bytes), r.Name, "objects")
		c <- prometheus.MustNewConstMetric(bytesDesc, prometheus.GaugeValue, float64(r.EventBytes), r.Name, "events")
	}
}
