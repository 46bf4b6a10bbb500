package server

import (
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// withSteps logs a slow request for a resource with its steps: the filters, and the calls of other services. It has
// the names and fields of upstream's handlers (k8s.io/apiserver/pkg/endpoints/handlers/trace_util.go). The services log
// their slow calls with the same audit ID.
func withSteps(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !telemetry.Verbose(telemetry.StepsVerbosity) {
			h.ServeHTTP(w, req)
			return
		}
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || !info.IsResourceRequest || info.Verb == "" || LongRunning(req, info) {
			h.ServeHTTP(w, req)
			return
		}
		id := audit.GetAuditIDTruncated(req.Context())
		ctx, steps := telemetry.StartSteps(req.Context(), strings.ToUpper(info.Verb[:1])+info.Verb[1:],
			"audit-id", id,
			"client", req.RemoteAddr,
			"resource", info.Resource,
			"url", req.URL.Path,
			"user-agent", req.UserAgent(),
			"verb", req.Method,
		)
		defer steps.End()
		h.ServeHTTP(w, req.WithContext(rpc.WithAuditID(ctx, id)))
	})
}
