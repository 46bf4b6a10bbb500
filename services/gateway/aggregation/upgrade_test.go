package aggregation

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// upgraded returns a client's connection through p, whose request has a deadline. ended closes when the request's
// handler ends, and late after the deadline.
func upgraded(t *testing.T, p *Proxy) (conn net.Conn, ended, late <-chan struct{}) {
	t.Helper()
	done, expired := make(chan struct{}), make(chan struct{})
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer close(done)
		// the connection to the aggregated server is made before the deadline
		ctx, cancel := context.WithTimeout(req.Context(), 2*time.Second)
		defer cancel()
		context.AfterFunc(ctx, func() { close(expired) })
		ctx = request.WithUser(request.WithRequestInfo(ctx, &request.RequestInfo{}), &user.DefaultInfo{Name: "bob"})
		p.Serve(w, req.WithContext(ctx), "metrics.k8s.io", "v1")
	}))
	t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", front.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /apis/metrics.k8s.io/v1/nodes/n/console HTTP/1.1\r\nHost: x\r\n"+
		"Connection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	return conn, done, expired
}

func await(t *testing.T, end <-chan struct{}, failure string) {
	t.Helper()
	select {
	case <-end:
	case <-time.After(2 * time.Minute):
		t.Error(failure)
	}
}

// A connection that the aggregated server has upgraded outlives the request's deadline, and ends with its client.
func TestAnUpgradeOutlivesTheRequestsDeadline(t *testing.T) {
	gone := make(chan struct{})
	p := proxyTo(t, newAggregatedServer(t, func(w http.ResponseWriter, _ *http.Request) {
		defer close(gone)
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(conn, rw)
	}))
	conn, ended, late := upgraded(t, p)
	from := bufio.NewReader(conn)
	resp, err := http.ReadResponse(from, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	await(t, late, "the deadline does not pass")
	fmt.Fprintln(conn, "still here")
	if text, err := from.ReadString('\n'); err != nil || text != "still here\n" {
		t.Errorf("%q, %v", text, err)
	}
	conn.Close()
	await(t, gone, "the other server's connection stays")
	await(t, ended, "the handler goes on")
}

// An aggregated server that accepts the connection and never responds loses it at the request's deadline.
func TestAnUpgradeWithoutAnAnswerEndsAtTheDeadline(t *testing.T) {
	gone := make(chan struct{})
	p := proxyTo(t, newAggregatedServer(t, func(_ http.ResponseWriter, req *http.Request) {
		defer close(gone)
		<-req.Context().Done()
	}))
	_, ended, _ := upgraded(t, p)
	await(t, gone, "the other server's connection stays")
	await(t, ended, "the handler goes on")
}
