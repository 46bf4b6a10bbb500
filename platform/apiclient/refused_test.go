package apiclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"watershed.dev/platform/porttest"
)

// A GET waits for a gateway that does not listen yet, until its context ends. A request with a body does not wait.
func TestAGetWaitsForAGateway(t *testing.T) {
	address := fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
	client := &http.Client{Transport: retryRefused(http.DefaultTransport)}
	if _, err := client.Post("http://"+address, "", strings.NewReader("x")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a POST: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	req, _ := http.NewRequestWithContext(short, http.MethodGet, "http://"+address, nil)
	if _, err := client.Do(req); err == nil {
		t.Error("a GET without a gateway succeeds")
	}
	got := make(chan error, 1)
	refused := make(chan struct{}, 1)
	go func() {
		transport := roundTripperFunc(func(req *http.Request) (*http.Response, error) {
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				select {
				case refused <- struct{}{}:
				default:
				}
			}
			return resp, err
		})
		resp, err := (&http.Client{Transport: retryRefused(transport)}).Get("http://" + address)
		if err == nil {
			resp.Body.Close()
		}
		got <- err
	}()
	<-refused
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	gateway := httptest.NewUnstartedServer(http.NotFoundHandler())
	gateway.Listener.Close()
	gateway.Listener = l
	gateway.Start()
	defer gateway.Close()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

type roundTripperFunc func(*http.Request) (*http.Response, error)

func (f roundTripperFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
