package server

import (
	"context"
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
)

// MetricsInfoFunc returns the RequestInfo from which metrics take their labels. It contains nothing that a client
// chooses freely.
type MetricsInfoFunc func(*request.RequestInfo) *request.RequestInfo

// metricsInfoResolver resolves requests for upstream's filters that label metrics by RequestInfo.
type metricsInfoResolver MetricsInfoFunc

// NewRequestInfo implements request.RequestInfoResolver.
func (metricsInfo metricsInfoResolver) NewRequestInfo(req *http.Request) (*request.RequestInfo, error) {
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		info = nil
	}
	return metricsInfo(info), nil
}

// withMetricsInfo wraps next in filters that label metrics by the RequestInfo in the context. A request that they
// reject would leave its resource or path as a label for good, so they get the result of metricsInfo. Filters use
// ownInfo for decisions. next gets the request's own RequestInfo.
func withMetricsInfo(
	next http.Handler,
	metricsInfo MetricsInfoFunc,
	filters func(http.Handler) http.Handler,
) http.Handler {
	filtered := filters(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if own := ownInfo(req.Context(), nil); own != nil {
			req = req.WithContext(request.WithRequestInfo(req.Context(), own))
		}
		next.ServeHTTP(w, req)
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if info, ok := request.RequestInfoFrom(req.Context()); ok {
			if labels := metricsInfo(info); labels != info {
				ctx := context.WithValue(req.Context(), ownKey{}, info)
				req = req.WithContext(request.WithRequestInfo(ctx, labels))
			}
		}
		filtered.ServeHTTP(w, req)
	})
}

// ownKey is the context key of a request's own RequestInfo, within filters that get another.
type ownKey struct{}

// ownInfo returns a request's own RequestInfo. It is info unless withMetricsInfo has replaced it.
func ownInfo(ctx context.Context, info *request.RequestInfo) *request.RequestInfo {
	if own, ok := ctx.Value(ownKey{}).(*request.RequestInfo); ok {
		return own
	}
	return info
}
