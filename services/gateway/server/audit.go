package server

import (
	"fmt"
	"maps"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	upstreamaudit "k8s.io/apiserver/pkg/audit"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/h2writer"
)

// withAudit audits requests with upstream's filter. Upstream reports that a response is complete when its handler
// returns. For a detached watch, the event waits until the watch ends.
func withAudit(next http.Handler, auditor *audit.Auditor) http.Handler {
	if auditor.Sink == nil || auditor.Policy == nil {
		return next
	}
	plain := genericapifilters.WithAudit(next, auditor.Sink, auditor.Policy, LongRunning)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || info.Verb != "watch" {
			plain.ServeHTTP(w, req)
			return
		}
		sink := &watchSink{auditor.Sink, req}
		genericapifilters.WithAudit(next, sink, auditor.Policy, LongRunning).ServeHTTP(w, req)
	})
}

// watchSink is the audit sink of a watch.
type watchSink struct {
	upstreamaudit.Sink
	req *http.Request
}

// ProcessEvents implements upstream's Sink.
func (s *watchSink) ProcessEvents(events ...*auditinternal.Event) bool {
	if len(events) != 1 || events[0].Stage != auditinternal.StageResponseComplete || !h2writer.Detached(s.req) {
		return s.Sink.ProcessEvents(events...)
	}
	e, sink, layers := events[0], s.Sink, request.AuditAnnotationsFromLatencyTrackers(s.req.Context())
	h2writer.AtEnd(s.req, func(panicked any) {
		completeEvent(e, layers, panicked)
		sink.ProcessEvents(e)
	})
	return true
}

// completeEvent completes the event of a watch that ends now, as upstream's filter does
// (k8s.io/apiserver/pkg/endpoints/filters/audit.go). layers are the latencies to annotate.
func completeEvent(e *auditinternal.Event, layers map[string]string, panicked any) {
	now := time.Now()
	e.StageTimestamp = metav1.NewMicroTime(now)
	if panicked != nil {
		e.Stage = auditinternal.StagePanic
		e.ResponseStatus = &metav1.Status{
			Code:    http.StatusInternalServerError,
			Status:  metav1.StatusFailure,
			Reason:  metav1.StatusReasonInternalError,
			Message: fmt.Sprintf("APIServer panic'd: %v", panicked),
		}
		return
	}
	if latency := now.Sub(e.RequestReceivedTimestamp.Time); latency > annotatedLatency && len(layers) > 0 {
		layers["apiserver.latency.k8s.io/total"] = latency.String()
		if e.Annotations == nil {
			e.Annotations = map[string]string{}
		}
		maps.Copy(e.Annotations, layers)
	}
}

// annotatedLatency is upstream's least latency of an event with annotations of latency.
const annotatedLatency = 500 * time.Millisecond
