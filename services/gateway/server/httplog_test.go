package server

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/klog/v2"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/telemetry/telemetrytest"
	"watershed.dev/services/gateway/h2writer"
)

// logsOf starts logs with a value of --vmodule until the test ends.
func logsOf(tb testing.TB, vmodule string) *bytes.Buffer {
	before := slog.Default()
	var out bytes.Buffer
	if err := (&telemetry.Options{VModule: vmodule}).StartLogs("gateway", &out); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = (&telemetry.Options{}).StartLogs("gateway", io.Discard)
		klog.ClearLogger()
		slog.SetDefault(before)
	})
	return &out
}

// loggedChain returns the filters of the HTTP log around h, for user a.
func loggedChain(h http.Handler) http.Handler {
	h = withHTTPLogging(withUser(withLoggedUser(h)))
	return genericapifilters.WithAuditInit(genericapifilters.WithRequestInfo(h, paths.RequestInfo))
}

// A request has a line with its user and the size of its response, also of a body that bypasses the ResponseWriter.
func TestARequestIsLogged(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	const body = "a response"
	for vmodule, want := range map[string]string{
		"httplog=3": `level=INFO v=3 caller=httplog/httplog.go:`,
		"other=3":   "",
	} {
		for name, write := range map[string]func(http.ResponseWriter, *http.Request){
			"writer": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) },
			"stream": func(w http.ResponseWriter, req *http.Request) {
				w.(http.Flusher).Flush()
				s := h2writer.StreamFrom(req)
				for !s.Hijack(req.Context(), 0) && req.Context().Err() == nil {
					time.Sleep(time.Millisecond) // until the connection's window is known
				}
				if err := s.Write(req.Context(), time.Minute, []byte(body)); err != nil {
					t.Error(err)
				}
				if err := s.Finish(req.Context()); err != nil {
					t.Error(err)
				}
			},
		} {
			out, done := logsOf(t, vmodule), make(chan struct{}, 1)
			chain := loggedChain(http.HandlerFunc(write))
			s := serve(t, &Config{}, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				chain.ServeHTTP(w, req)
				done <- struct{}{}
			}))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/api/v1/pods", nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := s.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			<-done
			if string(got) != body || err != nil {
				t.Errorf("%s: %q, %v", name, got, err)
			}
			line := out.String()
			if want == "" {
				if line != "" {
					t.Errorf("%s: %s", name, line)
				}
				continue
			}
			for _, part := range []string{want, "verb=LIST URI=/api/v1/pods ", " user=a bytes=10 resp="} {
				if strings.Count(line, part) != 1 {
					t.Errorf("%s lacks %q: %s", name, part, line)
				}
			}
		}
	}
}

// BenchmarkHTTPLog measures the HTTP log's share of a request, with the log off and on.
func BenchmarkHTTPLog(b *testing.B) {
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	without := genericapifilters.WithAuditInit(genericapifilters.WithRequestInfo(withUser(ok), paths.RequestInfo))
	for _, c := range []struct {
		name, vmodule string
		h             http.Handler
	}{{"none", "", without}, {"off", "", loggedChain(ok)}, {"on", "httplog=3", loggedChain(ok)}} {
		b.Run(c.name, func(b *testing.B) {
			out := logsOf(b, c.vmodule)
			req := httptest.NewRequest(http.MethodGet, "/api/v1/namespaces/default/pods/x", nil)
			b.ReportAllocs()
			for b.Loop() {
				c.h.ServeHTTP(httptest.NewRecorder(), req)
				out.Reset()
			}
		})
	}
}
