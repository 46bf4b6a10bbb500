package edge

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
)

// bounded serves whoever the X-User header names, over HTTP/1 or HTTP/2. A watch lasts until its client leaves.
func bounded(t *testing.T, c BoundsConfig, http2 bool) (*httptest.Server, *bounds) {
	t.Helper()
	b := newBounds(&c)
	h := b.filter(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if info, _ := request.RequestInfoFrom(req.Context()); info.Verb == "watch" {
			_ = http.NewResponseController(w).Flush()
			<-req.Context().Done()
		}
	}))
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		name, groups, _ := strings.Cut(req.Header.Get("X-User"), "/")
		u := &user.DefaultInfo{Name: name, Groups: []string{groups}}
		h := genericapifilters.WithRequestInfo(h, paths.RequestInfo)
		h.ServeHTTP(w, req.WithContext(request.WithUser(req.Context(), u)))
	}))
	s.Config.ErrorLog = quiet()
	b.watch(s.Config)
	if s.EnableHTTP2 = http2; http2 {
		s.TLS = s.Config.TLSConfig
		if err := shareConnections(s.Config, b.within); err != nil {
			t.Fatal(err)
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, b
}

// clientOf has a connection of its own.
func clientOf(t *testing.T, s *httptest.Server) *http.Client {
	transport := s.Client().Transport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func ask(ctx context.Context, t *testing.T, c *http.Client, url, who string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-User", who)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// until waits for what the server learns by itself.
func until(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func TestAUserHasSoManyConnections(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		s, b := bounded(t, BoundsConfig{Connections: 2}, http2)
		get := func(c *http.Client, who string) *http.Response {
			t.Helper()
			resp := ask(t.Context(), t, c, s.URL+"/api/v1/pods", who)
			resp.Body.Close()
			return resp
		}
		first, second, third := clientOf(t, s), clientOf(t, s), clientOf(t, s)
		for _, c := range []*http.Client{first, second, first} {
			if resp := get(c, "a"); resp.StatusCode != http.StatusOK || (resp.ProtoMajor == 2) != http2 {
				t.Errorf("HTTP/2 %v: %s %s", http2, resp.Proto, resp.Status)
			}
		}
		if resp := get(third, "a"); resp.StatusCode != http.StatusTooManyRequests ||
			resp.Header.Get("Retry-After") == "" {
			t.Errorf("HTTP/2 %v: a third connection: %s", http2, resp.Status)
		}
		for _, who := range []string{"b", "a/system:masters"} {
			if resp := get(third, who); resp.StatusCode != http.StatusOK {
				t.Errorf("HTTP/2 %v: %s: %s", http2, who, resp.Status)
			}
		}
		first.CloseIdleConnections()
		until(t, "a closed connection does not count", func() bool {
			return get(third, "a").StatusCode == http.StatusOK
		})
		for _, c := range []*http.Client{first, second, third} {
			c.CloseIdleConnections()
		}
		until(t, "nothing is left", func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return len(b.connections) == 0 && len(b.users) == 0
		})
	}
}

func TestAUserHasSoManyStreams(t *testing.T) {
	s, _ := bounded(t, BoundsConfig{Streams: 2}, true)
	c := clientOf(t, s)
	const watch = "/api/v1/pods?watch=1"
	ctx, leave := context.WithCancel(t.Context())
	for range 2 {
		if resp := ask(ctx, t, c, s.URL+watch, "a"); resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status)
		}
	}
	for who, want := range map[string]int{"a": http.StatusTooManyRequests, "b": http.StatusOK, "a/system:masters": http.StatusOK} {
		if resp := ask(t.Context(), t, c, s.URL+watch, who); resp.StatusCode != want {
			t.Errorf("%s: %s, want %d", who, resp.Status, want)
		}
	}
	if resp := ask(t.Context(), t, c, s.URL+"/api/v1/pods", "a"); resp.StatusCode != http.StatusOK {
		t.Errorf("a list: %s", resp.Status)
	}
	leave()
	until(t, "a watch that ended does not count", func() bool {
		return ask(t.Context(), t, c, s.URL+watch, "a").StatusCode == http.StatusOK
	})
}
