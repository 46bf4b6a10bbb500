package server

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/net/http2"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/recovery"
)

// timed serves a handler with the timeout in the request's header Within.
func timed(t *testing.T, info *request.RequestInfo, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	inner := withTimeout(h, unchangedInfo)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := request.WithRequestInfo(req.Context(), info)
		if d, err := time.ParseDuration(req.Header.Get("Within")); err == nil {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		inner.ServeHTTP(w, req.WithContext(ctx))
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func getWithin(s *httptest.Server, within string) (code int, body string, err error) {
	req, err := http.NewRequest("GET", s.URL, nil)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Within", within)
	resp, err := s.Client().Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}

// After the deadline, the gateway responds for the handler or aborts its response. The handler's later output is
// discarded.
func TestARequestHasItsTime(t *testing.T) {
	short := &request.RequestInfo{Verb: "get"}
	release := make(chan struct{})
	var later sync.WaitGroup
	later.Add(2)
	hang := func(begun bool) http.HandlerFunc {
		return func(w http.ResponseWriter, req *http.Request) {
			defer later.Done()
			req.Header.Set("Changed", "by the handler")
			if begun {
				_, _ = w.Write([]byte("half"))
				w.(http.Flusher).Flush()
			}
			<-release
			w.Header().Set("Late", "yes")
			if _, err := w.Write([]byte("late")); !errors.Is(err, http.ErrHandlerTimeout) {
				t.Errorf("a late response is written: %v", err)
			}
		}
	}
	if code, body, err := getWithin(timed(t, short, hang(false)), "10ms"); err != nil ||
		code != http.StatusGatewayTimeout || !strings.Contains(body, `"reason":"Timeout"`) ||
		!strings.Contains(body, "within the allotted timeout") {
		t.Errorf("%d %s, %v", code, body, err)
	}
	if code, body, err := getWithin(timed(t, short, hang(true)), "2s"); err == nil {
		t.Errorf("a partial response ends without an error: %d %s", code, body)
	}
	close(release)
	later.Wait()
	if code, body, err := getWithin(timed(t, short, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("A", "b")
		w.WriteHeader(http.StatusTeapot)
		_, _ = w.Write([]byte("in time"))
	}), "1m"); err != nil || code != http.StatusTeapot || body != "in time" {
		t.Errorf("%d %s, %v", code, body, err)
	}
	if _, _, err := getWithin(timed(t, short, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
		"1m"); err == nil {
		t.Error("a handler that aborts sends a response")
	}
	watch := &request.RequestInfo{Verb: "watch"}
	if code, body, err := getWithin(timed(t, watch, func(w http.ResponseWriter, req *http.Request) {
		<-req.Context().Done()
		_, _ = w.Write([]byte("ended by itself"))
	}), "10ms"); err != nil || code != http.StatusOK || body != "ended by itself" {
		t.Errorf("a watch: %d %s, %v", code, body, err)
	}
}

// A client that does not read its response ends its handler no later than the request's deadline. The handler would
// otherwise keep its seat in flow control.
func TestAnUnreadResponseEndsAtItsDeadline(t *testing.T) {
	ended := make(chan error)
	h := withTimeout(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		piece := make([]byte, 1<<20)
		for {
			if _, err := w.Write(piece); err != nil {
				ended <- err
				return
			}
		}
	}), unchangedInfo)
	s := serve(t, defaults(t), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := request.WithRequestInfo(req.Context(), &request.RequestInfo{Verb: "get"})
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		h.ServeHTTP(w, req.WithContext(ctx))
	}))
	_, f := preface(t, s, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	if err := f.WriteHeaders(http2.HeadersFrameParam{
		StreamID:      1,
		BlockFragment: getHeaders(),
		EndHeaders:    true,
		EndStream:     true,
	}); err != nil {
		t.Fatal(err)
	}
	conn, err := tls.Dial("tcp", s.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case <-ended:
		case <-time.After(2 * time.Minute):
			t.Fatal("a handler still writes")
		}
	}
}

// Handlers that continue after their clients have left are counted.
func TestWorkAfterAClientHasLeftIsCounted(t *testing.T) {
	metrics.Register()
	count := func(status string) (n float64) {
		families, err := legacyregistry.DefaultGatherer.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				l := m.GetLabel()
				if f.GetName() == "apiserver_request_post_timeout_total" && len(l) == 2 &&
					l[0].GetValue() == sourceClientLeft && l[1].GetValue() == status {
					n += m.GetCounter().GetValue()
				}
			}
		}
		return n
	}
	for value, status := range map[any]string{
		"":                    metrics.PostTimeoutHandlerOK,
		http.ErrAbortHandler:  metrics.PostTimeoutHandlerOK,
		"a fault of the test": metrics.PostTimeoutHandlerPanic,
	} {
		before, panics := count(status), testutil.ToFloat64(recovery.Metrics()[0])
		ctx, leave := context.WithCancel(t.Context())
		answered := make(chan struct{})
		h := withTimeout(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			leave()
			<-answered
			if value != "" {
				panic(value)
			}
		}), unchangedInfo)
		ctx = request.WithRequestInfo(ctx, &request.RequestInfo{Verb: "get"})
		req := httptest.NewRequestWithContext(ctx, "GET", "/", nil)
		h.ServeHTTP(httptest.NewRecorder(), req)
		close(answered)
		for until := time.Now().Add(2 * time.Minute); count(status) != before+1; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%v counts %v as %s", value, count(status)-before, status)
			}
		}
		panicked := testutil.ToFloat64(recovery.Metrics()[0]) > panics
		if panicked != (status == metrics.PostTimeoutHandlerPanic) {
			t.Errorf("%v is counted as a panic: %v", value, panicked)
		}
	}
}

// Workers run every function. At most maxIdleWorkers of them are idle, and none for long.
func TestWorkersAreUsedAgain(t *testing.T) {
	p := &workerPool{}
	var ran atomic.Int64
	before := runtime.NumGoroutine()
	for range 1000 {
		var wg sync.WaitGroup
		for range 5 {
			wg.Add(1)
			p.run(func() { ran.Add(1); wg.Done() })
		}
		wg.Wait()
	}
	if n := ran.Load(); n != 5000 {
		t.Errorf("%d of 5000 were run", n)
	}
	if n := runtime.NumGoroutine() - before; n > maxIdleWorkers {
		t.Errorf("%d goroutines wait", n)
	}
	release := make(chan struct{})
	for range 4 * maxIdleWorkers {
		p.run(func() { <-release })
	}
	close(release)
	for until := time.Now().Add(2 * time.Minute); runtime.NumGoroutine()-before > maxIdleWorkers; runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatalf("%d goroutines wait", runtime.NumGoroutine()-before)
		}
	}
	for until := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatalf("%d goroutines wait for good", runtime.NumGoroutine()-before)
		}
	}
}
