package apiclient

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"watershed.dev/platform/egress"
)

// freezable is a connection whose writes are lost once it is frozen.
type freezable struct {
	net.Conn
	frozen atomic.Bool
}

// Write implements io.Writer.
func (c *freezable) Write(p []byte) (int, error) {
	if c.frozen.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// pipeServer serves HTTP/2 with TLS on pipes.
type pipeServer struct {
	tls   *tls.Config
	mu    sync.Mutex
	conns []*freezable
}

func (s *pipeServer) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	conn := &freezable{Conn: server}
	s.mu.Lock()
	s.conns = append(s.conns, conn)
	s.mu.Unlock()
	go func() {
		secure := tls.Server(conn, s.tls)
		if secure.Handshake() != nil {
			return
		}
		(&http2.Server{}).ServeConn(secure, &http2.ServeConnOpts{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, "ok")
			}),
		})
	}()
	return client, nil
}

func get(ctx context.Context, rt http.RoundTripper) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://example.com/", nil)
	if err != nil {
		return err
	}
	resp, err := rt.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.ReadAll(resp.Body)
	return err
}

// A gateway that receives requests and sends nothing is left before the policy is stale.
func TestFrozenGatewayIsLeft(t *testing.T) {
	cert := httptest.NewTLSServer(nil)
	config, clientTLS := cert.TLS.Clone(), cert.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	cert.Close()
	config.NextProtos = []string{http2.NextProtoTLS}
	synctest.Test(t, func(t *testing.T) {
		server := &pipeServer{tls: config}
		client := utilnet.SetTransportDefaults(&http.Transport{DialContext: server.dial, TLSClientConfig: clientTLS})
		defer client.CloseIdleConnections()
		rt := leaveDeadPeers(client)
		if err := get(t.Context(), rt); err != nil {
			t.Fatal(err)
		}
		server.conns[0].frozen.Store(true)
		start := time.Now()
		for get(t.Context(), rt) != nil {
			time.Sleep(100 * time.Millisecond) // of synctest's clock
		}
		if took := time.Since(start); took > pingAfter+pingTimeout+time.Second || len(server.conns) != 2 {
			t.Errorf("%d connections, the second after %v", len(server.conns), took)
		}
	})
}

// A dial without a response ends, because it delays the dial of the next gateway.
func TestDialOfLostGatewayEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		start := time.Now()
		err := get(t.Context(), leaveDeadPeers(client))
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != dialTimeout {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// The clients of a service have the short timeouts, unless an operator has set client-go's variables.
func TestConfigLeavesDeadPeers(t *testing.T) {
	for _, tc := range []struct {
		name, idle string
		want       time.Duration
	}{
		{"default", "", pingAfter},
		{"operator", "30", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", tc.idle)
			config, err := Config(writeKubeconfig(t, tc.name), "authz")
			if err != nil {
				t.Fatal(err)
			}
			rt, err := rest.TransportFor(config)
			if err != nil {
				t.Fatal(err)
			}
			var transport *http.Transport
			egress.ChangeTransport(rt, func(t *http.Transport) { transport = t })
			if got := transport.TLSHandshakeTimeout; got != dialTimeout {
				t.Errorf("a handshake may take %v", got)
			}
			got := transport.HTTP2
			if got == nil || got.SendPingTimeout != tc.want || got.PingTimeout != pingTimeout {
				t.Errorf("got %+v, want a ping after %v", got, tc.want)
			}
		})
	}
}

// writeKubeconfig writes a kubeconfig whose TLS options no other client has.
func writeKubeconfig(t *testing.T, serverName string) string {
	t.Helper()
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1", TLSServerName: serverName}
	c.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	c.CurrentContext = "c"
	data, err := clientcmd.Write(*c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
