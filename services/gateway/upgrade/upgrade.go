// Package upgrade closes an upgraded connection's backend connection when its request ends. Upstream's proxies dial a
// backend without its transport, and wait for its response without a context (k8s.io/apimachinery/pkg/util/proxy,
// tryUpgrade). A backend that accepts the connection and sends nothing would keep it after the client left, together
// with the request's goroutines. Upstream's proxies also close the client's socket before the client has read all of it
// (lingeringConn).
//
// The context of the request has these states:
//
//	request's context ──(client's connection hijacked)──► connection's context ──► ended
//
//	request's context     ends with the deadline, or when the client leaves.
//	connection's context  ends when the handler closes the client's connection, or with end.
package upgrade

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
)

// Transport returns a transport that dials as via does. It closes its connections when ctx ends.
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

// WithCloseCancel returns w and req for a handler that may hijack the client's connection. Before the hijack, the new
// context ends with the request's context. After the hijack, it ends when the connection is closed, because net/http
// does not notice then that a client left. The request's deadline does not apply to an upgraded connection, as in
// kube-apiserver.
//
// The handler calls end last. end closes the connection and waits until the client has closed its own, for up to 30 s,
// if the connection is upgraded. The request counts for its user until then.
func WithCloseCancel(w http.ResponseWriter, req *http.Request) (_ http.ResponseWriter, _ *http.Request, end func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(req.Context()))
	t := &hijackableWriter{ResponseWriter: w, untie: context.AfterFunc(req.Context(), cancel), cancel: cancel}
	return t, req.WithContext(ctx), t.end
}
