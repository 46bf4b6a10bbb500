package telemetry

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// UpstreamMetric returns the metric of a Kubernetes library that does not export it. own has the same name, help and
// labels. UpstreamMetric panics if there is no such metric. If --disabled-metrics disables it, the result records
// nothing.
func UpstreamMetric[T interface {
	metrics.Registerable
	IsCreated() bool
}](own T) T {
	var registered prometheus.AlreadyRegisteredError
	switch err := legacyregistry.Register(own); {
	case errors.As(err, &registered):
		return registered.ExistingCollector.(T)
	case err == nil && !own.IsCreated():
		return own
	default:
		panic(fmt.Sprintf("upstream's metric %s has changed: %v", own.FQName(), err))
	}
}
