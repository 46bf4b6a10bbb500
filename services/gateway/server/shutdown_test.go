package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	genericfilters "k8s.io/apiserver/pkg/server/filters"

	"watershed.dev/platform/paths"
	"watershed.dev/services/gateway/audit"
)

func freePort(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// A stopping server is not ready at once, serves for the delay, and then ends its watches in steps. Requests in flight
// finish. This is kube-apiserver's order (features F5).
func TestAServerStopsInOrder(t *testing.T) {
	port := freePort(t)
	c := &Config{
		BindAddress:      "127.0.0.1",
		SecurePort:       port,
		RequestTimeout:   30 * time.Second,
		ShutdownDelay:    time.Second,
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
	for until := time.Now().Add(10 * time.Second); get("/") != nil; time.Sleep(10 * time.Millisecond) {
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
	port := freePort(t)
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
	ctx, stop := context.WithCancel(t.Context())
	listening, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- s.Run(ctx, h, nil, func() { close(listening) }) }()
	<-listening
	get := func(path string) int {
		client := &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			ForceAttemptHTTP2: true,
		}}
		resp, err := client.Get("https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) + path)
		if err != nil {
			return 0
		}
		resp.Body.Close()
		if resp.ProtoMajor != 1 {
			t.Errorf("%s is served", resp.Proto)
		}
		return resp.StatusCode
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

// A shutdown ends the watches of clients on connections. Informers within the process would open theirs again at once,
// without a pause, until the last request has ended. Their watches stay open, so that admission is fresh until then.
func TestAShutdownKeepsTheWatchesOfTheProcess(t *testing.T) {
	s := NewServer(defaults(t))
	var stopping <-chan struct{}
	api := http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		stopping = s.ShutdownStagger(req.Context())
	})
	auditor := &audit.Auditor{Policy: policy.NewFakePolicyRuleEvaluator(auditinternal.LevelNone, nil)}
	loopback := BuildLoopbackChain(api, authorizerfactory.NewAlwaysAllowAuthorizer(), auditor)
	for name, test := range map[string]struct {
		handler http.Handler
		ends    bool
	}{
		"a connection": {api, true},
		"the process":  {loopback, false},
	} {
		req := httptest.NewRequest("GET", "/api/v1/pods?watch=1", nil)
		test.handler.ServeHTTP(httptest.NewRecorder(), req)
		if ends := stopping != nil; ends != test.ends {
			t.Errorf("a watch of %s ends with the shutdown: %v", name, ends)
		}
	}
}
