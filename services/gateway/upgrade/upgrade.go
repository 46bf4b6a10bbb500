// Package upgrade ties upgraded connections to the requests that they are for. Upstream's proxies dial a backend past
// its transport, and wait for its answer without a context (k8s.io/apimachinery/pkg/util/proxy, tryUpgrade). A backend
// that accepts the connection and answers nothing would keep it, and its request's goroutines, after the client left.
package upgrade

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
)

// Transport returns a transport that dials as via does, and closes its connections when ctx ends.
func Transport(ctx context.Context, via http.RoundTripper) (proxy.UpgradeRequestRoundTripper, error) {
	dial, err := utilnet.DialerFor(via)
	if err != nil {
		return nil, err
	}
	conf, err := utilnet.TLSClientConfig(via)
	if err != nil {
		return nil, err
	}
	if conf == nil { // upstream does not verify the server if there is a dialer and no configuration
		conf = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return proxy.NewUpgradeRequestRoundTripper(&http.Transport{
		TLSClientConfig: conf,
		DialContext: func(dialing context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(dialing, network, address)
			if err == nil {
				context.AfterFunc(ctx, func() { _ = conn.Close() })
			}
			return conn, err
		},
	}, proxy.MirrorRequest), nil
}

// WithCloseCancel returns w and req for a handler that takes the client's connection over. The context of req ends when the
// request's context ends, until the connection is taken over. From then on it ends when the connection is closed:
// net/http does not notice that a client left, and the request's deadline does not apply to an upgraded connection, as
// in kube-apiserver. cancel ends it as well.
func WithCloseCancel(w http.ResponseWriter, req *http.Request) (_ http.ResponseWriter, _ *http.Request, cancel func()) {
	ctx, end := context.WithCancel(context.WithoutCancel(req.Context()))
	untie := context.AfterFunc(req.Context(), end)
	return &hijackableWriter{w, untie, end}, req.WithContext(ctx), func() { untie(); end() }
}
