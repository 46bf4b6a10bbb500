package telemetry

import (
	"testing"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// TestUpstreamMetric checks that the metric of a library is found by its definition, that a disabled metric records
// nothing, and that a metric that no library has panics.
func TestUpstreamMetric(t *testing.T) {
	gauge := func(name string) *metrics.GaugeVec {
		return metrics.NewGaugeVec(&metrics.GaugeOpts{Name: name, Help: "a gauge"}, []string{"label"})
	}
	upstream := gauge("telemetry_test_gauge")
	legacyregistry.MustRegister(upstream)
	if UpstreamMetric(gauge("telemetry_test_gauge")) != upstream {
		t.Error("another gauge is returned")
	}
	metrics.SetDisabledMetrics([]string{"telemetry_test_disabled"})
	legacyregistry.MustRegister(gauge("telemetry_test_disabled"))
	UpstreamMetric(gauge("telemetry_test_disabled")).WithLabelValues("a").Inc()
	defer func() {
		if recover() == nil {
			t.Error("a metric that no library has is accepted")
		}
	}()
	UpstreamMetric(gauge("telemetry_test_absent"))
}
