package watch

import "github.com/prometheus/client_golang/prometheus"

// Metrics of this package.
var (
	clients = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_clients",
		Help: "Open watches of clients.",
	})
	receivers = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcast_receivers",
		Help: "Open watches that are receivers of a watch broadcast.",
	})
	broadcasts = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcasts",
		Help: "Streams from the watch tier or registry that watches with equal queries share.",
	})
	broadcastBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcast_bytes",
		Help: "Bytes of recent events that watch broadcasts hold.",
	})
	delivered = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_events_total",
		Help: "Events written to clients from watch broadcasts.",
	})
	resumes = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_resumes_total",
		Help: "Streams that resumed after their source was unavailable. Clients do not notice.",
	})
	reassignments = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_reassignments_total",
		Help: "Watch broadcasts that moved to a replica that now owns their resource, before the old stream ended.",
	})
	slowClients = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_slow_clients_total",
		Help: "Watches ended because the client accepted no data for --watch-write-timeout (over quota: 250 ms).",
	})
	overRate = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watches_over_rate_total",
		Help: "Watches ended because their user exceeded --max-watch-rate-per-user and they fell too far behind.",
	})
	throttledWatches = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watches_throttled",
		Help: "Watches that wait because their user exceeds --max-watch-rate-per-user.",
	})
	inflightBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_inflight_bytes",
		Help: "Bytes of events that watches hold because clients have not accepted them yet.",
	})
)

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{
		clients,
		receivers,
		broadcasts,
		broadcastBytes,
		delivered,
		resumes,
		reassignments,
		slowClients,
		overRate,
		throttledWatches,
		inflightBytes,
	}
}
