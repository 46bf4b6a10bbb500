package server

import (
	"context"
	"net/http"
	"time"

	"k8s.io/apiserver/pkg/endpoints/metrics"

	"watershed.dev/platform/telemetry"
)

// filterStartKey is the context key of a request's *time.Time: when its current filter began. The filters of a request
// run in sequence, on the same goroutine.
type filterStartKey struct{}

// withFilter puts a filter before next. It records the time until the filter calls next, as upstream does
// (k8s.io/apiserver/pkg/endpoints/filterlatency). If the request is traced, the filter has a span. name is
// kube-apiserver's, if it has the filter.
func withFilter(name string, next http.Handler, filter func(http.Handler) http.Handler) http.Handler {
	h := withFilterSpan(name, filterEnded(name, next), filter)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		start, ok := req.Context().Value(filterStartKey{}).(*time.Time)
		if !ok {
			start = new(time.Time)
			req = req.WithContext(context.WithValue(req.Context(), filterStartKey{}, start))
		}
		*start = time.Now()
		h.ServeHTTP(w, req)
	})
}

// filterEnded records that the filter before next has ended.
func filterEnded(name string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if start, ok := req.Context().Value(filterStartKey{}).(*time.Time); ok {
			metrics.RecordFilterLatency(req.Context(), name, time.Since(*start))
			telemetry.AddStep(req.Context(), name)
		}
		next.ServeHTTP(w, req)
	})
}
