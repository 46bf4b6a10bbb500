package audit

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"
	pluginlog "k8s.io/apiserver/plugin/pkg/audit/log"

	"watershed.dev/platform/paths"
)

// BenchmarkMetadata measures the cost of a request's two events at level Metadata, without the disk.
func BenchmarkMetadata(b *testing.B) {
	log := pluginlog.NewBackend(io.Discard, pluginlog.FormatJson, auditv1.SchemeGroupVersion)
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	req := httptest.NewRequest("GET", "/api/v1/namespaces/default/pods/a", nil)
	req.Header.Set("User-Agent", "kubectl/v1.36.3 (linux/amd64) kubernetes/0123456")
	info, _ := paths.RequestInfo.NewRequestInfo(req)
	u := &user.DefaultInfo{
		Name:   "system:serviceaccount:default:robot",
		UID:    "0b8ff0a3-2c39-4ad6-9a45-3a1d1c1e7d11",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"},
	}
	for name, level := range map[string]auditinternal.Level{"none": auditinternal.LevelNone,
		"metadata": auditinternal.LevelMetadata} {
		h := filters.WithAuditInit(filters.WithAudit(handler, log, policy.NewFakePolicyRuleEvaluator(level, nil), nil))
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ctx := request.WithUser(request.WithRequestInfo(b.Context(), info), u)
				h.ServeHTTP(httptest.NewRecorder(), req.WithContext(ctx))
			}
		})
	}
}
