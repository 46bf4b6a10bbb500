package apiclient

import (
	"context"
	"net"
	"net/http"
	"os"
	"time"

	"watershed.dev/platform/egress"
)

const (
	// pingAfter is how long a gateway may send nothing before the client pings the gateway. A watch receives a bookmark
	// every second.
	pingAfter = 3 * time.Second
	// pingTimeout is how long the client waits for the response to a ping. Then it closes the connection.
	pingTimeout = 2 * time.Second
	// dialTimeout bounds the dial of all addresses of gateway-internal, and then the TLS handshake. Each unresponsive
	// address takes 2 s of the dial.
	dialTimeout = 4 * time.Second
)

// leaveDeadPeers shortens the timeouts of a transport, so that a client leaves the gateway of a lost node within the
// default of --policy-freshness-bound. client-go would wait for 45 s, for a dial 30 s, and for a handshake 10 s.
// client-go's environment variables win (k8s.io/apimachinery/pkg/util/net).
func leaveDeadPeers(rt http.RoundTripper) http.RoundTripper {
	return egress.ChangeTransport(rt, func(t *http.Transport) {
		if t.HTTP2 != nil { // another client has changed it
			return
		}
		t.HTTP2 = &http.HTTP2Config{}
		if os.Getenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS") == "" {
			t.HTTP2.SendPingTimeout = pingAfter
		}
		if os.Getenv("HTTP2_PING_TIMEOUT_SECONDS") == "" {
			t.HTTP2.PingTimeout = pingTimeout
		}
		t.TLSHandshakeTimeout = dialTimeout
		if dial := t.DialContext; dial != nil {
			t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				ctx, cancel := context.WithTimeout(ctx, dialTimeout)
				defer cancel()
				return dial(ctx, network, addr)
			}
		}
	})
}
