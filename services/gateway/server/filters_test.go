package server

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// TestAFilterIsTimedUntilItCallsNext checks that the duration of a filter excludes the filters after it and the
// response.
func TestAFilterIsTimedUntilItCallsNext(t *testing.T) {
	metrics.Register()
	const slow = 200 * time.Millisecond
	filter := func(delay time.Duration) func(http.Handler) http.Handler {
		return func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				time.Sleep(delay)
				next.ServeHTTP(w, req)
			})
		}
	}
	synctest.Test(t, func(t *testing.T) {
		h := http.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(slow) }))
		h = withFilter("test-last", h, filter(0))
		h = withFilter("test-slow", h, filter(slow))
		h = withFilter("test-first", h, filter(0))
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
	})
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seconds := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "apiserver_request_filter_duration_seconds" {
			for _, m := range f.GetMetric() {
				seconds[m.GetLabel()[0].GetValue()] = m.GetHistogram().GetSampleSum()
			}
		}
	}
	for name, least := range map[string]float64{"test-first": 0, "test-slow": slow.Seconds(), "test-last": 0} {
		if s, ok := seconds[name]; !ok || s < least || least == 0 && s > 0 {
			t.Errorf("%s took %v s of %v", name, s, slow)
		}
	}
}
