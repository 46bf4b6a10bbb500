// Package proxy connects clients with kubelets, pods, services and nodes: exec, attach, port-forward, logs and proxy.
// It does not choose or authorize the backend: registry returns its URL. A request runs on its handler's goroutine.
package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/util/flushwriter"
	translator "k8s.io/apiserver/pkg/util/proxy"
	proxymetrics "k8s.io/apiserver/pkg/util/proxy/metrics"
	"k8s.io/client-go/transport"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"watershed.dev/platform/egress"
	"watershed.dev/platform/identity"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/upgrade"
)

// Config is the gateway's client configuration for kubelets, under kube-apiserver's names.
type Config struct {
	KubeletCertFile, KubeletKeyFile, KubeletCAFile string
	// Rate bounds a connection in bytes per second. 0 means no bound.
	Rate int64
}

// AddFlags registers the flags --kubelet-* and --max-connection-bytes-per-sec, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.KubeletCertFile, "kubelet-client-certificate", "",
		"Path to a client cert file for TLS to kubelets.")
	fs.StringVar(&c.KubeletKeyFile, "kubelet-client-key", "", "Path to a client key file for TLS to kubelets.")
	fs.StringVar(&c.KubeletCAFile, "kubelet-certificate-authority", "",
		"Path to a cert file for the certificate authority of kubelets. Without it a kubelet's certificate is not "+
			"checked.")
	fs.Int64Var(&c.Rate, "max-connection-bytes-per-sec", 0,
		"If non-zero, throttle each user connection to this number of bytes/sec. Applies to exec, attach, "+
			"port-forward and proxy.")
}

// Handler proxies requests to the URL that registry returned. Its methods are safe for concurrent use.
type Handler struct {
	config     *Config
	transports map[registryv1.Transport]http.RoundTripper
}

// New returns a handler with the configured certificates. dialer dials into the cluster. If it is nil, connections are
// direct.
func New(c *Config, dialer *transport.DialHolder) (*Handler, error) {
	kubelet := func(insecure bool) (http.RoundTripper, error) {
		t := transport.TLSConfig{
			CertFile:       c.KubeletCertFile,
			KeyFile:        c.KubeletKeyFile,
			CAFile:         c.KubeletCAFile,
			ReloadTLSFiles: true,
		}
		if insecure || c.KubeletCAFile == "" {
			t.CAFile, t.Insecure = "", true
		}
		rt, err := transport.New(&transport.Config{TLS: t, DialHolder: dialer})
		if err != nil {
			return nil, fmt.Errorf("--kubelet-client-certificate %q, --kubelet-client-key %q, "+
				"--kubelet-certificate-authority %q: %w", c.KubeletCertFile, c.KubeletKeyFile, c.KubeletCAFile, err)
		}
		return egress.LimitHeaders(rt), nil
	}
	checked, err := kubelet(false)
	if err != nil {
		return nil, err
	}
	unchecked, err := kubelet(true)
	if err != nil {
		return nil, err
	}
	dial := (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	if dialer != nil {
		dial = dialer.Dial
	}
	proxied := utilnet.SetTransportDefaults(&http.Transport{
		DialContext:     dial,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // pods have self-signed certificates
	})
	egress.LimitHeaders(proxied)
	return &Handler{c, map[registryv1.Transport]http.RoundTripper{
		registryv1.Transport_TRANSPORT_KUBELET:          checked,
		registryv1.Transport_TRANSPORT_KUBELET_INSECURE: unchecked,
		registryv1.Transport_TRANSPORT_PROXY:            proxied,
	}}, nil
}

// Serve proxies a request for the object with a name over c. fail writes an error if the response has not started.
func (p *Handler) Serve(w http.ResponseWriter, req *http.Request, name string, c *registryv1.Connection,
	fail func(error)) {
	if c.Url == "" { // a log of a pod that is not scheduled yet
		w.WriteHeader(http.StatusNoContent)
		return
	}
	location, err := url.Parse(c.Url)
	roundTripper, ok := p.transports[c.Transport]
	if err != nil || !ok {
		fail(fmt.Errorf("cannot connect to %q with transport %s", c.Url, c.Transport))
		return
	}
	if c.ContentType != "" {
		p.serveLog(w, req, name, c, location, roundTripper, fail)
		return
	}
	if httpstream.IsUpgradeRequest(req) {
		var end func()
		w, req, end = upgrade.WithCloseCancel(w, req)
		defer end()
	}
	upgraded, err := upgrade.Transport(req.Context(), roundTripper)
	if err != nil {
		fail(err)
		return
	}
	if c.Rewrite {
		owner := ""
		if u, ok := request.UserFrom(req.Context()); ok {
			owner = identity.QuotaOwner(u, req.RemoteAddr)
		}
		var end func()
		roundTripper, end = egress.LimitHTML(roundTripper, owner)
		defer end()
	}
	plain := proxy.NewUpgradeAwareHandler(location, roundTripper, c.Rewrite, c.UpgradeRequired, responder(fail))
	plain.UpgradeTransport = upgraded
	plain.MaxBytesPerSec = p.config.Rate
	var h http.Handler = plain
	if s := c.Translate; s != nil && s.PortForward {
		proxymetrics.IncWebSocketStreamingRequest(req.Context(), "portforward", "translated_at_apiserver")
		h = translator.NewTranslatingHandler(plain, translator.NewTunnelingHandler(plain),
			wsstream.IsWebSocketRequestWithTunnelingProtocol)
	} else if s != nil {
		subresource := "exec"
		if info, ok := request.RequestInfoFrom(req.Context()); ok {
			subresource = info.Subresource // or attach
		}
		proxymetrics.IncWebSocketStreamingRequest(req.Context(), subresource, "translated_at_apiserver")
		streams := translator.NewStreamTranslatorHandler(location, upgraded, p.config.Rate, translator.Options{
			Stdin:  s.Stdin,
			Stdout: s.Stdout,
			Stderr: s.Stderr,
			Tty:    s.Tty,
		})
		h = translator.NewTranslatingHandler(plain, streams, wsstream.IsWebSocketRequestWithStreamCloseProtocol)
	}
	h.ServeHTTP(w, req)
}

type responder func(error)

// Error implements proxy.ErrorResponder.
func (r responder) Error(_ http.ResponseWriter, _ *http.Request, err error) { r(err) }

// serveLog serves a container's log. A kubelet's error becomes an API error.
func (p *Handler) serveLog(
	w http.ResponseWriter,
	req *http.Request,
	name string,
	c *registryv1.Connection,
	location *url.URL,
	roundTripper http.RoundTripper,
	fail func(error),
) {
	s := &genericrest.LocationStreamer{
		Location:        location,
		Transport:       roundTripper,
		ContentType:     c.ContentType,
		Flush:           c.Flush,
		ResponseChecker: genericrest.NewGenericHttpResponseChecker(schema.GroupResource{Resource: "pods/log"}, name),
		RedirectChecker: genericrest.PreventRedirects,
	}
	out, flush, contentType, err := s.InputStream(req.Context(), "v1", req.Header.Get("Accept"))
	if err != nil {
		fail(err)
		return
	}
	if out == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	defer out.Close()
	if wsstream.IsWebSocketRequest(req) {
		_ = wsstream.NewReader(out, true, wsstream.NewDefaultReaderProtocols()).Copy(w, req)
		return
	}
	if contentType == "" {
		contentType = "application/octet-stream"
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush() // the client sees that the log is found before its first line
	var to io.Writer = w
	if flush {
		to = flushwriter.Wrap(w)
	}
	defer context.AfterFunc(req.Context(), func() { _ = out.Close() })()
	_, _ = io.Copy(to, out)
}
