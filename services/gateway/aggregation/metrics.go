package aggregation

import (
	"errors"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	kubemetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// certificateCounters are kube-aggregator's counters of servers with a deprecated certificate.
type certificateCounters struct{ missingSAN, insecureSHA1 *kubemetrics.Counter }

// counters registers kube-aggregator's counters, or returns the counters of its package if the process has them.
var counters = sync.OnceValue(func() certificateCounters {
	return certificateCounters{
		missingSAN: register("x509_missing_san_total", "Counts the number of requests to servers missing SAN "+
			"extension in their serving certificate OR the number of connection failures due to the lack of x509 "+
			"certificate SAN extension missing (either/or, based on the runtime environment)"),
		insecureSHA1: register("x509_insecure_sha1_total", "Counts the number of requests to servers with insecure "+
			"SHA1 signatures in their serving certificate OR the number of connection failures due to the insecure "+
			"SHA1 signatures (either/or, based on the runtime environment)"),
	}
})

func register(name, help string) *kubemetrics.Counter {
	c := kubemetrics.NewCounter(&kubemetrics.CounterOpts{
		Namespace:      "apiserver",
		Subsystem:      "kube_aggregator",
		Name:           name,
		Help:           help,
		StabilityLevel: kubemetrics.ALPHA,
	})
	var other prometheus.AlreadyRegisteredError
	if errors.As(legacyregistry.Register(c), &other) {
		if existing, ok := other.ExistingCollector.(*kubemetrics.Counter); ok {
			return existing
		}
	}
	return c
}
