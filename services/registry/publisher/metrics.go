package publisher

import (
	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/eventlog"
)

var (
	publishedEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_publisher_events_total",
		Help: "Events published to the log, by stored resource.",
	}, []string{"resource"})
	resetCount = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_resets_total",
		Help: "Resets of the whole log: etcd had compacted the next revision, etcd was in another epoch, or the log " +
			"was empty.",
	})
	rejectedEvents = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_rejected_events_total",
		Help: "Events that could not be decoded, or are too large for a message. Each resets its resource: readers " +
			"list it again.",
	})
	failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_publisher_failures_total",
		Help: "Terms that an error of NATS or etcd ended. The next term resumes from the log's last message.",
	})
	publishedRevision = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_publisher_revision",
		Help: "The revision of etcd up to which the log of the main etcd is complete, on the registry that publishes.",
	})
	leading = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_publisher_leading",
		Help: "1 on the registry that publishes the log of the main etcd, 0 on the others, by --log-name. Each `up` has a " +
			"log of its own.",
	}, []string{"log_name"})
	missingReplicas = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_publisher_missing_log_replicas",
		Help: "Replicas of the event log that --log-replicas requires and NATS lacks, by log, on the registry that " +
			"publishes the log. A replica that is offline or behind is missing.",
	}, []string{"log"})
)

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{publishedEvents, resetCount, rejectedEvents, failures, publishedRevision, leading,
		missingReplicas}
}

func (p *Publisher) setLeading(value float64) {
	if p.Log.ID == eventlog.Main {
		leading.WithLabelValues(p.Log.Name).Set(value)
	}
}
