package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	genericfilters "k8s.io/apiserver/pkg/server/filters"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/porttest"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/delegatedauth"
)

// A stopping server is not ready at once, serves for the delay, and then ends its watches in steps. Requests in flight
// finish. This is kube-apiserver's order (features F5).
func TestAServerStopsInOrder(t *testing.T) {
	port := porttest.FreePort(t)
	c := &Config{
		BindAddress:      "127.0.0.1",
		SecurePort:       port,
		RequestTimeout:   30 * time.Second,
		ShutdownDelay:    5 * time.Second,
		WatchGracePeriod: time.Second,
		HTTP2MaxStreams:  100,
	}
	c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
	s := NewServer(c)
	begun, end := make(chan struct{}), make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/long" {
			close(begun)
			<-end
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, h, nil, func() {}) }()
	get := func(path string) error {
		client := &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			ForceAttemptHTTP2: true,
		}}
		resp, err := client.Get("https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) + path)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	for until := time.Now().Add(2 * time.Minute); get("/") != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("it does not serve")
		}
	}
	long := make(chan error, 1)
	go func() { long <- get("/long") }()
	<-begun
	stoppedAt, ends := time.Now(), make(chan []time.Duration)
	go func() {
		var times []time.Duration
		for _, w := range s.shutdownStagger {
			<-w
			times = append(times, time.Since(stoppedAt))
		}
		ends <- times
	}()
	stop()
	<-s.ShuttingDown
	if err := get("/"); err != nil {
		t.Errorf("it does not serve during --shutdown-delay-duration: %v", err)
	}
	endTimes := <-ends
	if first, last := endTimes[0], endTimes[len(endTimes)-1]; first < c.ShutdownDelay ||
		last-first < c.WatchGracePeriod/2 {
		t.Errorf("watches end from %v to %v after the shutdown started", first, last)
	}
	select {
	case err := <-long:
		t.Errorf("a request in flight was cut off: %v", err)
	case err := <-ended:
		t.Errorf("it has stopped before its last request: %v", err)
	default:
	}
	close(end)
	if err := <-long; err != nil {
		t.Errorf("a request in flight ends with %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if get("/") == nil {
		t.Error("it still serves")
	}
}

// With --shutdown-send-retry-after the server listens until the requests in flight have ended, and rejects others. With
// --disable-http2-serving it serves HTTP/1.1 only.
func TestAStoppingServerRejectsRequests(t *testing.T) {
	port := porttest.FreePort(t)
	c := defaults(t, "--shutdown-send-retry-after", "--disable-http2-serving", "--bind-address=127.0.0.1",
		"--secure-port="+strconv.Itoa(port))
	c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
	s := NewServer(c)
	begun, end := make(chan struct{}), make(chan struct{})
	h := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/long" {
			close(begun)
			<-end
		}
	}))
	h = genericfilters.WithWaitGroup(h, LongRunning, s.InFlight)
	h = genericapifilters.WithRequestInfo(genericfilters.WithRetryAfter(h, s.delayOver), paths.RequestInfo)
	request, stop, ended := runUntilStopped(t, s, port, h)
	get := func(path string) int {
		code, proto := request(path)
		if code != 0 && proto != 1 {
			t.Errorf("HTTP/%d is served", proto)
		}
		return code
	}
	long := make(chan int, 1)
	go func() { long <- get("/long") }()
	<-begun
	stop()
	<-s.delayOver
	if code := get("/"); code != http.StatusTooManyRequests {
		t.Errorf("a request during the shutdown gets %d", code)
	}
	close(end)
	if code := <-long; code != http.StatusOK {
		t.Errorf("a request in flight gets %d", code)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// With --shutdown-send-retry-after the server also listens until its watches have ended, within their grace period. It
// then does not wait for other long-running requests, such as a log.
func TestAStoppingServerListensUntilWatchesEnd(t *testing.T) {
	port := porttest.FreePort(t)
	c := defaults(t, "--shutdown-send-retry-after", "--shutdown-watch-termination-grace-period=1m",
		"--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(port))
	c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
	s := NewServer(c)
	begun, end := make(chan struct{}, 2), make(chan struct{})
	h := s.watches.countEnds(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		begun <- struct{}{}
		select {
		case <-end:
		case <-req.Context().Done():
		}
		if strings.HasSuffix(req.URL.Path, "/log") {
			<-req.Context().Done()
		}
	}))
	h = genericfilters.WithWatchTerminationDuringShutdown(h, s.watches, s.watches)
	h = genericapifilters.WithRequestInfo(genericfilters.WithRetryAfter(h, s.delayOver), paths.RequestInfo)
	request, stop, ended := runUntilStopped(t, s, port, h)
	get := func(path string) int {
		code, _ := request(path)
		return code
	}
	go get("/api/v1/pods?watch=1")
	go get("/api/v1/namespaces/x/pods/p/log")
	<-begun
	<-begun
	stop()
	<-s.delayOver
	for range 50 { // a closed listener would refuse the later connections
		if code := get("/api/v1/pods"); code != http.StatusTooManyRequests {
			t.Fatalf("a request during the shutdown gets %d", code)
		}
	}
	close(end)
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(c.WatchGracePeriod / 2):
		t.Error("the server has not stopped after its watches")
	}
}

// A shutdown ends the watches of clients on connections. Informers within the process would open theirs again at once,
// without a pause, until the last request has ended. Their watches stay open, so that policies are fresh until then.
func TestAShutdownKeepsTheWatchesOfTheProcess(t *testing.T) {
	s := NewServer(defaults(t))
	for name, test := range map[string]struct {
		chain func(http.Handler) http.Handler
		ends  bool
	}{
		"a connection": {func(api http.Handler) http.Handler { return api }, true},
		"the process": {func(api http.Handler) http.Handler {
			return BuildLoopbackChain(api, authorizerfactory.NewAlwaysAllowAuthorizer(), &audit.Auditor{})
		}, false},
	} {
		called := false
		test.chain(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			called = true
			if ends := s.ShutdownStagger(req.Context()) != nil; ends != test.ends {
				t.Errorf("a watch of %s ends with the shutdown: %v", name, ends)
			}
		})).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/api/v1/pods?watch=1", nil))
		if !called {
			t.Errorf("the request of %s is not served", name)
		}
	}
}

// refusingAuthn knows no credential.
type refusingAuthn struct{ authnv1.AuthnClient }

func (refusingAuthn) Authenticate(context.Context, *authnv1.AuthenticateRequest, ...grpc.CallOption) (
	*authnv1.AuthenticateResponse, error) {
	return &authnv1.AuthenticateResponse{}, nil
}

// After --shutdown-delay-duration a watch gets 503. It would end at once, and client-go would open it again without a
// pause. Other requests on the open connections are still served.
func TestAStoppingServerRejectsWatches(t *testing.T) {
	s := NewServer(defaults(t))
	h := s.BuildHandlerChain(http.NotFoundHandler(), ChainConfig{
		Authn:       delegatedauth.NewAuthenticator(refusingAuthn{}, nil, nil),
		Auditor:     &audit.Auditor{},
		MetricsInfo: unchangedInfo,
	})
	expect := func(path string, code int, retryAfter string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if got := w.Header().Get("Retry-After"); w.Code != code || got != retryAfter {
			t.Errorf("%s gets %d and Retry-After %q, not %d and %q", path, w.Code, got, code, retryAfter)
		}
	}
	expect("/api/v1/pods?watch=1", http.StatusUnauthorized, "")
	close(s.delayOver)
	expect("/api/v1/pods?watch=1", http.StatusServiceUnavailable, "1")
	expect("/api/v1/pods", http.StatusUnauthorized, "")
}

// A stopping server closes a connection whose TLS handshake ends after the listener has closed. No stream uses it.
// http.Server.Shutdown sends GOAWAY only on the connections that it finds at first.
func TestAStoppingServerClosesLateConnections(t *testing.T) {
	port := porttest.FreePort(t)
	c := defaults(t, "--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(port))
	c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
	s := NewServer(c)
	ctx, stop := context.WithCancel(t.Context())
	listening, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- s.Run(ctx, http.NotFoundHandler(), nil, func() { close(listening) }) }()
	<-listening
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	open := func(conn net.Conn) *http2.ClientConn {
		tlsConn := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http2.NextProtoTLS}})
		if err := tlsConn.Handshake(); err != nil {
			t.Fatal(err)
		}
		h2, err := new(http2.Transport).NewClientConn(tlsConn)
		if err == nil {
			err = h2.Ping(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		return h2
	}
	late := dial()
	early := open(dial()) // the server has accepted late before it
	stop()
	// until GOAWAY has come, of which a ClientConn has no notification
	for until := time.Now().Add(2 * time.Minute); !early.State().Closing; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("a connection that was open gets no GOAWAY")
		}
	}
	open(late)
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(c.RequestTimeout / 2):
		t.Error("the server waits for a connection without a stream")
	}
}

// runUntilStopped runs a server on a port until the caller calls stop, and waits until it listens. request sends a
// request over a connection of its own. The code is 0 if there is no response.
func runUntilStopped(t *testing.T, s *Server, port int, h http.Handler) (request func(path string) (code, proto int),
	stop func(), ended <-chan error) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	listening, result := make(chan struct{}), make(chan error, 1)
	go func() { result <- s.Run(ctx, h, nil, func() { close(listening) }) }()
	<-listening
	return func(path string) (code, proto int) {
		client := &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			ForceAttemptHTTP2: true,
		}}
		resp, err := client.Get("https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) + path)
		if err != nil {
			return 0, 0
		}
		resp.Body.Close()
		return resp.StatusCode, resp.ProtoMajor
	}, stop, result
}
