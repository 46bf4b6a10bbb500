package watch

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/watchcache/cache"
)

// Slow is a watch that has not read all its events. Waiting is the number of unread events.
type Slow struct {
	Resource string `json:"resource"`
	Query    string `json:"query"`
	Revision int64  `json:"revision"`
	Waiting  int64  `json:"waiting"`
}

// Len returns the number of open watches.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.watchers)
}

// maxSlowest bounds the watches that Slowest returns.
const maxSlowest = 10

// Slowest returns at most ten watches, the most unread events first.
func (s *Server) Slowest() []Slow {
	type behind struct {
		*watcher
		waiting int64
	}
	var all []behind
	s.mu.Lock()
	for w := range s.watchers {
		if waiting := w.events.Behind(cache.Cursor(w.cursor.Load())); waiting > 0 {
			all = append(all, behind{w, waiting})
		}
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b behind) int { return cmp.Compare(b.waiting, a.waiting) })
	var slowest []Slow
	for _, w := range all[:min(len(all), maxSlowest)] {
		query := w.query.Describe() // a selector may be large
		query = query[:min(len(query), maxDescribed)]
		slowest = append(slowest, Slow{w.query.Entry.StorageResource, query, w.sentRevision.Load(), w.waiting})
	}
	return slowest
}

// maxDescribed bounds the description of a query in bytes.
const maxDescribed = 256

// Rate returns the recent rate of events written to streams, per second.
func (s *Server) Rate() float64 { return s.rate.perSecond() }

// Metrics returns the package's collectors.
func (s *Server) Metrics() []prometheus.Collector {
	return []prometheus.Collector{s.delivered, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_watchfanout_watchers",
		Help: "Open watch streams.",
	}, func() float64 { return float64(s.Len()) })}
}

// rate computes events per second since windowStart. A call after rateWindow begins the next window.
type rate struct {
	count atomic.Int64

	mu          sync.Mutex
	windowStart time.Time
	windowCount int64
	value       float64
}

const rateWindow = 5 * time.Second

func (r *rate) perSecond() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, since := r.count.Load(), time.Since(r.windowStart)
	switch {
	case r.windowStart.IsZero():
		r.windowStart, r.windowCount = time.Now(), n
	case since >= time.Second:
		r.value = float64(n-r.windowCount) / since.Seconds()
		if since >= rateWindow {
			r.windowStart, r.windowCount = time.Now(), n
		}
	}
	return r.value
}
