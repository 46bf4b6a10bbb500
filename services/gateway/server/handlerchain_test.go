package server

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/util/runtime"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/recovery"
)

// unchangedInfo labels every request by its own RequestInfo.
func unchangedInfo(info *request.RequestInfo) *request.RequestInfo { return info }

// A client notices a truncated response, with and without upstream's runtime.ReallyCrash. A partial list must not pass
// for a complete list.
func TestAbortedResponseIsSeen(t *testing.T) {
	before := runtime.ReallyCrash
	defer func() { runtime.ReallyCrash = before }()
	for _, crash := range []bool{true, false} { // false: as in cmd/watershed
		runtime.ReallyCrash = crash
		for _, http2 := range []bool{true, false} {
			for name, value := range map[string]any{"abort": http.ErrAbortHandler, "panic": "a bug"} {
				h := withPanicRecovery(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					fmt.Fprint(w, "half a list")
					_ = http.NewResponseController(w).Flush()
					panic(value)
				}), unchangedInfo)
				s := httptest.NewUnstartedServer(genericapifilters.WithRequestInfo(h, paths.RequestInfo))
				s.EnableHTTP2, s.Config.ErrorLog = http2, discardLogger()
				s.StartTLS()
				resp, err := s.Client().Get(s.URL + "/api/v1/pods")
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err == nil || !strings.HasPrefix(string(body), "half a list") {
					t.Errorf("crash %v, HTTP/2 %v, %s: %q ends without an error", crash, http2, name, body)
				}
				s.Close()
			}
		}
	}
}

// A panic before the response starts is a 500 or a closed connection. The next request is served.
func TestPanicEndsOnlyItsRequest(t *testing.T) {
	before := runtime.ReallyCrash
	defer func() { runtime.ReallyCrash = before }()
	runtime.ReallyCrash = false
	h := withPanicRecovery(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/api/v1/pods" {
			panic("a bug")
		}
		fmt.Fprint(w, "ok")
	}), unchangedInfo)
	s := httptest.NewUnstartedServer(genericapifilters.WithRequestInfo(h, paths.RequestInfo))
	s.Config.ErrorLog = discardLogger()
	s.Start()
	defer s.Close()
	panics := testutil.ToFloat64(recovery.Metrics()[0])
	if resp, err := s.Client().Get(s.URL + "/api/v1/pods"); err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusInternalServerError {
			t.Errorf("%s", resp.Status)
		}
	}
	if n := testutil.ToFloat64(recovery.Metrics()[0]) - panics; n != 1 {
		t.Errorf("%v panics are counted", n)
	}
	resp, err := s.Client().Get(s.URL + "/api/v1/nodes")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("%s", resp.Status)
	}
}

// Filters that label metrics get the labeled RequestInfo. The handler below them gets the request's own.
func TestFiltersCountLabelledRequests(t *testing.T) {
	for _, own := range []*request.RequestInfo{
		{IsResourceRequest: true, Resource: "a client's choice"},
		{Path: "/a client's choice"},
	} {
		shown := &request.RequestInfo{}
		var seen []*request.RequestInfo
		see := func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				info, _ := request.RequestInfoFrom(req.Context())
				seen = append(seen, info)
				h.ServeHTTP(w, req)
			})
		}
		none := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
		h := withMetricsInfo(see(none), func(*request.RequestInfo) *request.RequestInfo { return shown }, see)
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		h.ServeHTTP(httptest.NewRecorder(), req.WithContext(request.WithRequestInfo(req.Context(), own)))
		if len(seen) != 2 || seen[0] != shown || seen[1] != own {
			t.Errorf("%+v", seen)
		}
	}
}

// inFlight returns a function that sends a request to a server with a limit of a single request, and returns the
// status. Requests for a path with "/held" last until the test ends, and return 0.
func inFlight(t *testing.T) (get func(path string) int) {
	s := &Server{config: &Config{MaxInFlight: 1, MaxMutating: 1}}
	held, entered := make(chan struct{}), make(chan struct{}, 10)
	api := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if strings.Contains(req.URL.Path, "/held") {
			entered <- struct{}{}
			<-held
		}
	})
	h := s.limited(api, ChainConfig{MetricsInfo: func(info *request.RequestInfo) *request.RequestInfo {
		out := *info
		out.Path, out.Resource, out.Subresource, out.APIGroup, out.APIVersion = "", "", "", "", ""
		return &out
	}})
	h = genericapifilters.WithRequestInfo(h, paths.RequestInfo)
	var wg sync.WaitGroup
	t.Cleanup(func() { close(held); wg.Wait() })
	return func(path string) int {
		w := httptest.NewRecorder()
		answered := make(chan struct{})
		wg.Go(func() {
			defer close(answered)
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		})
		select {
		case <-entered:
			return 0
		case <-answered:
			return w.Code
		}
	}
}

// A rejected request leaves nothing that its client chose in metrics.
func TestRefusedRequestsLeaveNoPath(t *testing.T) {
	metrics.Register()
	get := inFlight(t)
	if code := get("/held"); code != 0 {
		t.Fatalf("the held request is answered %d", code)
	}
	for _, path := range []string{
		"/strangers-choice",
		"/apis/strangers-choice/v1/x",
		"/api/v1/namespaces/x/pods/y/strangers-choice",
	} {
		if code := get(path); code != http.StatusTooManyRequests {
			t.Errorf("%s: %d", path, code)
		}
	}
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	refused := false
	for _, f := range families {
		refused = refused || f.GetName() == "apiserver_request_terminations_total"
		if strings.Contains(f.String(), "strangers-choice") {
			t.Errorf("%s has a label that a client chose", f.GetName())
		}
	}
	if !refused {
		t.Error("refused requests are not counted")
	}
}

// A stream of an aggregated server's resource is long-running, so it does not count as a request in flight.
func TestStreamsOfOtherServersTakeNoSeat(t *testing.T) {
	get := inFlight(t)
	if code := get("/apis/build.example/v1/namespaces/x/builds/held/log"); code != 0 {
		t.Fatalf("the held request is answered %d", code)
	}
	if code := get("/api/v1/pods"); code != http.StatusOK {
		t.Errorf("with an open stream, a request gets %d", code)
	}
}
