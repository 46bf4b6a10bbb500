package server

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	upstreamaudit "k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/h2writer"
)

// recordingAudit records the stages of events, with their codes.
type recordingAudit struct {
	upstreamaudit.Sink
	mu     sync.Mutex
	stages []string
}

func (r *recordingAudit) ProcessEvents(events ...*auditinternal.Event) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		code := int32(0)
		if e.ResponseStatus != nil {
			code = e.ResponseStatus.Code
		}
		r.stages = append(r.stages, fmt.Sprint(e.Stage, " ", code))
	}
	return true
}

// The audit event of a detached watch is complete when the watch ends, before its client sees the end.
func TestTheAuditEventOfADetachedWatchWaitsForItsEnd(t *testing.T) {
	for _, test := range []struct {
		panicked any
		last     string
	}{
		{nil, "ResponseComplete 200"},
		{"a fault of the test", "Panic 500"},
	} {
		sink, streams, returned := &recordingAudit{}, make(chan *h2writer.Stream, 1), make(chan struct{}, 1)
		auditor := &audit.Auditor{
			Sink:   sink,
			Policy: policy.NewFakePolicyRuleEvaluator(auditinternal.LevelMetadata, nil),
		}
		s := serveDetached(t, func(h http.Handler) http.Handler { return withAudit(h, auditor) }, streams, returned)
		req, err := http.NewRequestWithContext(t.Context(), "GET", s.URL+"/api/v1/pods?watch=1", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		stream := <-streams
		<-returned
		want := []string{"RequestReceived 0", "ResponseStarted 200"}
		if got := sink.seen(); !slices.Equal(got, want) {
			t.Errorf("while the watch is open: %v, want %v", got, want)
		}
		stream.End(test.panicked)
		_, err = io.Copy(io.Discard, resp.Body)
		if (err != nil) != (test.panicked != nil) {
			t.Errorf("the client sees %v", err)
		}
		if got := sink.seen(); !slices.Equal(got, append(want, test.last)) {
			t.Errorf("at the end: %v, want %s last", got, test.last)
		}
	}
}

func (r *recordingAudit) seen() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.stages)
}

// serveDetached serves watches of user a over HTTP/2, through a filter. Each watch is detached.
func serveDetached(t *testing.T, filter func(http.Handler) http.Handler, streams chan<- *h2writer.Stream,
	returned chan<- struct{}) *httptest.Server {
	h := filter(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		s := h2writer.StreamFrom(req)
		for until := time.Now().Add(2 * time.Minute); !s.Hijack(req.Context(), 0); time.Sleep(time.Millisecond) {
			if time.Now().After(until) { // the connection's window comes after the request
				t.Error("the stream is not hijacked")
				return
			}
		}
		if !s.Detach(func() {}) {
			t.Error("not detached")
		}
		streams <- s
	}))
	h = genericapifilters.WithAuditInit(genericapifilters.WithRequestInfo(withUser(h), paths.RequestInfo))
	s := httptest.NewUnstartedServer(h2writer.Handler(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.ServeHTTP(w, req)
		returned <- struct{}{}
	})))
	s.EnableHTTP2 = true
	l := newUserLimits(&UserLimitsConfig{})
	l.trackConnections(s.Config)
	if err := serveHTTP2(s.Config, defaultMaxStreams, l.connContext); err != nil {
		t.Fatal(err)
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func withUser(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.ServeHTTP(w, req.WithContext(request.WithUser(req.Context(), &user.DefaultInfo{Name: "a"})))
	})
}
