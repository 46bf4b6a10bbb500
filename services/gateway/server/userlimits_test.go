package server

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
	"watershed.dev/services/gateway/h2writer"
)

// serveLimited serves the user named by the X-User header, over HTTP/1 or HTTP/2. A watch lasts until its client
// leaves.
func serveLimited(t *testing.T, c UserLimitsConfig, http2 bool) (*httptest.Server, *userLimits) {
	t.Helper()
	l := newUserLimits(&c)
	h := l.filter(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
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
	s.Config.ErrorLog = discardLogger()
	l.trackConnections(s.Config)
	if s.EnableHTTP2 = http2; http2 {
		s.TLS = s.Config.TLSConfig
		if err := serveHTTP2(s.Config, defaultMaxStreams, l.connContext); err != nil {
			t.Fatal(err)
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, l
}

// clientOf returns a client with its own connection.
func clientOf(t *testing.T, s *httptest.Server) *http.Client {
	transport := s.Client().Transport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func doRequest(ctx context.Context, t *testing.T, c *http.Client, url, username string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-User", username)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// eventually waits for a condition that the server reaches asynchronously.
func eventually(t *testing.T, condition string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", condition)
		}
	}
}

func TestAUserHasSoManyConnections(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		s, l := serveLimited(t, UserLimitsConfig{Connections: 2}, http2)
		get := func(c *http.Client, username string) *http.Response {
			t.Helper()
			resp := doRequest(t.Context(), t, c, s.URL+"/api/v1/pods", username)
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
		for _, username := range []string{"b", "a/system:masters"} {
			if resp := get(third, username); resp.StatusCode != http.StatusOK {
				t.Errorf("HTTP/2 %v: %s: %s", http2, username, resp.Status)
			}
		}
		first.CloseIdleConnections()
		eventually(t, "a closed connection does not count", func() bool {
			return get(third, "a").StatusCode == http.StatusOK
		})
		for _, c := range []*http.Client{first, second, third} {
			c.CloseIdleConnections()
		}
		eventually(t, "nothing is left", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.connections) == 0 && len(l.users) == 0
		})
	}
}

// A connection without an authenticated request counts for its host: a 401 would renew its idle timeout.
func TestAHostHasSoManyUnattributedConnections(t *testing.T) {
	s, l := serveLimited(t, UserLimitsConfig{Connections: 2}, false)
	probe := func(c *http.Client, path string) error { // the filter counts probes for no user
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("X-User", "a")
		resp, err := c.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	first, second := clientOf(t, s), clientOf(t, s)
	for _, c := range []*http.Client{first, second} {
		if err := probe(c, "/livez"); err != nil {
			t.Fatal(err)
		}
	}
	third := clientOf(t, s)
	if err := probe(third, "/livez"); err != nil { // the oldest is closed
		t.Error(err)
	}
	open := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.connections)
	}
	eventually(t, "the first connection is closed", func() bool { return open() == 2 })
	if err := probe(second, "/api/v1/pods"); err != nil { // counts for its user from now on
		t.Fatal(err)
	}
	fourth := clientOf(t, s)
	if err := probe(fourth, "/livez"); err != nil || open() != 3 {
		t.Errorf("%v, %d connections", err, open())
	}
	for _, c := range []*http.Client{first, second, third, fourth} {
		c.CloseIdleConnections()
	}
	eventually(t, "nothing is left", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.connections) == 0 && len(l.users) == 0 && len(l.unattributed) == 0
	})
}

func TestAUserHasSoManyStreams(t *testing.T) {
	s, _ := serveLimited(t, UserLimitsConfig{Streams: 2}, true)
	c := clientOf(t, s)
	const watch = "/api/v1/pods?watch=1"
	ctx, leave := context.WithCancel(t.Context())
	for range 2 {
		if resp := doRequest(ctx, t, c, s.URL+watch, "a"); resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status)
		}
	}
	for username, want := range map[string]int{"a": http.StatusTooManyRequests, "b": http.StatusOK,
		"a/system:masters": http.StatusOK} {
		if resp := doRequest(t.Context(), t, c, s.URL+watch, username); resp.StatusCode != want {
			t.Errorf("%s: %s, want %d", username, resp.Status, want)
		}
	}
	if resp := doRequest(t.Context(), t, c, s.URL+"/api/v1/pods", "a"); resp.StatusCode != http.StatusOK {
		t.Errorf("a list: %s", resp.Status)
	}
	leave()
	eventually(t, "a watch that ended does not count", func() bool {
		return doRequest(t.Context(), t, c, s.URL+watch, "a").StatusCode == http.StatusOK
	})
}

// The size of a request has its host, its path, its query, each of its headers, and its user.
func TestRequestBytes(t *testing.T) {
	req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/abc?d=e", nil)
	req.Host, req.Header = "host", http.Header{"A": {"1", "2"}, "B": {"345"}}
	u := &user.DefaultInfo{Groups: []string{"g", "gg"}, Extra: map[string][]string{"key": {"value"}}}
	want := 4 + 4*pathCopies + 3*selectorFactor + 2 + 2 + 4 + 3*headerOverhead + 3 + 8
	if n := requestBytes(req, u); n != want {
		t.Errorf("%d bytes, want %d", n, want)
	}
}

// The requests of a user's open watches have a bound in bytes: a watch keeps its selectors.
func TestTheRequestsOfStreamsAreBounded(t *testing.T) {
	s, _ := serveLimited(t, UserLimitsConfig{Streams: 5000}, true)
	c := clientOf(t, s)
	watch := s.URL + "/api/v1/pods?watch=1&labelSelector=" + strings.Repeat("x", 600_000)
	ctx, leave := context.WithCancel(t.Context())
	open := 0
	for doRequest(ctx, t, c, watch, "a").StatusCode == http.StatusOK {
		open++
	}
	if open == 0 || open != 5000*bytesPerStream/(600_000*selectorFactor) {
		t.Errorf("%d watches are open", open)
	}
	for url, username := range map[string]string{watch: "b", s.URL + "/api/v1/pods?watch=1": "a"} {
		if resp := doRequest(t.Context(), t, c, url, username); resp.StatusCode != http.StatusOK {
			t.Errorf("another watch of %s: %s", username, resp.Status)
		}
	}
	leave()
	eventually(t, "a watch that ended does not count", func() bool {
		return doRequest(t.Context(), t, c, watch, "a").StatusCode == http.StatusOK
	})
}

// A detached watch counts until it ends.
func TestADetachedWatchCountsAsAStream(t *testing.T) {
	streams, returned := make(chan *h2writer.Stream, 1), make(chan struct{}, 10000)
	s := serveDetached(t, newUserLimits(&UserLimitsConfig{Streams: 1}).filter, streams, returned)
	watch := func() int {
		return doRequest(t.Context(), t, s.Client(), s.URL+"/api/v1/pods?watch=1", "").StatusCode
	}
	if code := watch(); code != http.StatusOK {
		t.Fatal(code)
	}
	<-returned
	if code := watch(); code != http.StatusTooManyRequests {
		t.Errorf("beside a detached watch: %d", code)
	}
	(<-streams).End(nil)
	eventually(t, "a watch that ended does not count", func() bool { return watch() == http.StatusOK })
	(<-streams).End(nil)
}
