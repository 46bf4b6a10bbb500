package proxy

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// If a backend accepts an upgrade's connection and never responds, it loses the connection when the client leaves. This
// holds for each upgrade protocol, and the request's goroutines end.
func TestAnUpgradeEndsWithItsClient(t *testing.T) {
	const pod = "/api/v1/namespaces/x/pods/a/"
	for name, c := range map[string]struct {
		path       string
		headers    map[string]string
		connection *registryv1.Connection
	}{
		"SPDY": {pod + "exec", map[string]string{"Upgrade": "SPDY/3.1"},
			&registryv1.Connection{UpgradeRequired: true, Translate: &registryv1.Streams{Stdout: true}}},
		"WebSocket": {pod + "exec", map[string]string{"Upgrade": "websocket", "Sec-WebSocket-Version": "13",
			"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "v5.channel.k8s.io"},
			&registryv1.Connection{UpgradeRequired: true, Translate: &registryv1.Streams{Stdout: true}}},
		"tunnel": {pod + "portforward", map[string]string{"Upgrade": "websocket", "Sec-WebSocket-Version": "13",
			"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "SPDY/3.1+portforward.k8s.io"},
			&registryv1.Connection{UpgradeRequired: true, Translate: &registryv1.Streams{PortForward: true}}},
		"proxy": {pod + "proxy", map[string]string{"Upgrade": "websocket"}, &registryv1.Connection{Rewrite: true}},
	} {
		t.Run(name, func(t *testing.T) {
			arrived, gone := make(chan struct{}), make(chan struct{})
			backend := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				close(arrived)
				<-req.Context().Done()
				close(gone)
			}))
			t.Cleanup(func() { backend.CloseClientConnections(); backend.Close() })
			k, ended := newTestHandler(t), make(chan struct{})
			front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				defer close(ended)
				c.connection.Url, c.connection.Transport = backend.URL, registryv1.Transport_TRANSPORT_PROXY
				k.Serve(w, req, "a", c.connection, func(error) {})
			}))
			t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", front.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, front.URL+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Connection", "Upgrade")
			for k, v := range c.headers {
				req.Header.Set(k, v)
			}
			if err := req.Write(conn); err != nil {
				t.Fatal(err)
			}
			wait := func(failure string, c <-chan struct{}) {
				t.Helper()
				select {
				case <-c:
				case <-time.After(2 * time.Minute):
					t.Fatalf("%s", failure)
				}
			}
			wait("the request does not reach the backend", arrived)
			conn.Close()
			wait("the backend's connection stays", gone)
			wait("the handler goes on", ended)
		})
	}
}
