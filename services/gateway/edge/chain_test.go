package edge

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/runtime"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"

	"watershed.dev/platform/paths"
)

// A client sees that an answer was cut short, whatever upstream's loops may do in this process: half a list is not to
// be taken for a whole one.
func TestAnAbortedAnswerIsSeen(t *testing.T) {
	before := runtime.ReallyCrash
	defer func() { runtime.ReallyCrash = before }()
	for _, crash := range []bool{true, false} { // false: as cmd/watershed has it
		runtime.ReallyCrash = crash
		for _, http2 := range []bool{true, false} {
			for what, value := range map[string]any{"abort": http.ErrAbortHandler, "panic": "a bug"} {
				h := recovered(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					fmt.Fprint(w, "half a list")
					_ = http.NewResponseController(w).Flush()
					panic(value)
				}))
				s := httptest.NewUnstartedServer(genericapifilters.WithRequestInfo(h, paths.RequestInfo))
				s.EnableHTTP2, s.Config.ErrorLog = http2, quiet()
				s.StartTLS()
				resp, err := s.Client().Get(s.URL + "/api/v1/pods")
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err == nil || !strings.HasPrefix(string(body), "half a list") {
					t.Errorf("crash %v, HTTP/2 %v, %s: %q ends without an error", crash, http2, what, body)
				}
				s.Close()
			}
		}
	}
}

// A panic before anything is answered is a 500 or a connection that breaks off, and the next request is served.
func TestAPanicEndsItsRequestAlone(t *testing.T) {
	before := runtime.ReallyCrash
	defer func() { runtime.ReallyCrash = before }()
	runtime.ReallyCrash = false
	h := recovered(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/api/v1/pods" {
			panic("a bug")
		}
		fmt.Fprint(w, "ok")
	}))
	s := httptest.NewUnstartedServer(genericapifilters.WithRequestInfo(h, paths.RequestInfo))
	s.Config.ErrorLog = quiet()
	s.Start()
	defer s.Close()
	if resp, err := s.Client().Get(s.URL + "/api/v1/pods"); err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusInternalServerError {
			t.Errorf("%s", resp.Status)
		}
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
