package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"
)

// A stopping server is not ready at once, serves for the delay, and then ends its watches in steps. Requests in flight
// finish. This is kube-apiserver's order (features F5).
func TestAServerStopsInOrder(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
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
	stoppedAt := time.Now()
	stop()
	<-s.ShuttingDown
	if err := get("/"); err != nil {
		t.Errorf("it does not serve during --shutdown-delay-duration: %v", err)
	}
	var endTimes []time.Duration
	for _, w := range s.shutdownStagger {
		<-w
		endTimes = append(endTimes, time.Since(stoppedAt))
	}
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
