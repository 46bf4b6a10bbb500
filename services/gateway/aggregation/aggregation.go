// Package aggregation forwards requests to aggregated API servers with the identity of their user, and caches the
// discovery and OpenAPI documents of these servers. It does not decide the availability of an APIService: registry
// does.
//
// The behaviour is that of k8s.io/kube-aggregator/pkg/apiserver at 0.36 (handler_proxy.go).
//
// DiscoveryManager.Run needs a goroutine of its own. Calls of Proxy.Set must not overlap. All other methods are safe
// for concurrent use.
package aggregation

import (
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"sync/atomic"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/authentication/user"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	proxyutil "k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/apiserver/pkg/util/x509metrics"
	"k8s.io/client-go/transport"
	"k8s.io/component-base/tracing"
	"k8s.io/streaming/pkg/httpstream"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/identity"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/upgrade"
)

// Config is the client certificate that identifies the gateway to aggregated servers, under kube-apiserver's names.
// With it, a server trusts the gateway's headers about the user.
type Config struct {
	CertFile, KeyFile string
	RejectRedirects   bool
}

// AddFlags registers the flags --proxy-client-* and --aggregator-reject-forwarding-redirect, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.CertFile, "proxy-client-cert-file", "",
		"Client certificate used to prove the identity of the gateway when it must call out during a request: to an "+
			"aggregated API server, with the user in headers.")
	fs.StringVar(&c.KeyFile, "proxy-client-key-file", "",
		"Private key for the client certificate of --proxy-client-cert-file.")
	fs.BoolVar(&c.RejectRedirects, "aggregator-reject-forwarding-redirect", true,
		"Whether the gateway rejects a redirect of an aggregated API server instead of passing it on.")
}

// CheckCertificate returns an error if the client certificate cannot be read. No certificate is no error.
func (c *Config) CheckCertificate() error {
	if c.CertFile == "" {
		return nil
	}
	if _, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile); err != nil {
		return fmt.Errorf("--proxy-client-cert-file %q with --proxy-client-key-file %q: %w", c.CertFile, c.KeyFile, err)
	}
	return nil
}

// Proxy forwards requests to aggregated servers.
type Proxy struct {
	config      *Config
	dialer      *transport.DialHolder
	apiServices []*registryv1.APIService // of the last view
	servers     atomic.Pointer[map[schema.GroupVersion]*server]
}

// server is the aggregated server of a group version.
type server struct {
	*registryv1.APIService
	transport http.RoundTripper
	err       error
}

// New returns a proxy after it has checked the certificate. dialer dials the servers. If it is nil, connections are
// direct.
func New(c *Config, dialer *transport.DialHolder) (*Proxy, error) {
	if err := c.CheckCertificate(); err != nil {
		return nil, err
	}
	p := &Proxy{config: c, dialer: dialer}
	p.servers.Store(&map[schema.GroupVersion]*server{})
	return p, nil
}

// Set replaces the servers by the servers of a view, and reports whether they have changed. An unchanged server keeps
// its connections.
func (p *Proxy) Set(v *discovery.View) (changed bool) {
	before := p.apiServices
	p.apiServices = v.ApiServices
	if slices.EqualFunc(before, v.ApiServices, func(a, b *registryv1.APIService) bool { return proto.Equal(a, b) }) {
		return false
	}
	old, now := *p.servers.Load(), map[schema.GroupVersion]*server{}
	for _, r := range v.ApiServices {
		gv := schema.GroupVersion{Group: r.Group, Version: r.Version}
		if previous := old[gv]; previous != nil && sameTransport(previous.APIService, r) && previous.err == nil {
			now[gv] = &server{APIService: r, transport: previous.transport}
			continue
		}
		created := &server{APIService: r}
		created.transport, created.err = p.dial(r)
		now[gv] = created
	}
	p.servers.Store(&now)
	return true
}

func sameTransport(a, b *registryv1.APIService) bool {
	return proto.Equal(transportOf(a), transportOf(b))
}

func transportOf(r *registryv1.APIService) *registryv1.APIService {
	return &registryv1.APIService{
		ServiceName:           r.ServiceName,
		ServiceNamespace:      r.ServiceNamespace,
		InsecureSkipTlsVerify: r.InsecureSkipTlsVerify,
		CaBundle:              r.CaBundle,
	}
}

func (p *Proxy) dial(r *registryv1.APIService) (http.RoundTripper, error) {
	c := &transport.Config{DialHolder: p.dialer, TLS: transport.TLSConfig{
		Insecure:   r.InsecureSkipTlsVerify,
		ServerName: r.ServiceName + "." + r.ServiceNamespace + ".svc",
		CAData:     r.CaBundle,
	}}
	if p.config.CertFile != "" { // the file is reloaded when it changes
		c.TLS.CertFile, c.TLS.KeyFile, c.TLS.ReloadTLSFiles = p.config.CertFile, p.config.KeyFile, true
	}
	c.Wrap(x509metrics.NewDeprecatedCertificateRoundTripperWrapperConstructor(
		counters().missingSAN, counters().insecureSHA1))
	rt, err := transport.New(c)
	if err != nil {
		return nil, err
	}
	return egress.LimitHeaders(rt), nil
}

// serverFor returns the aggregated server of a group version, or nil.
func (p *Proxy) serverFor(gv schema.GroupVersion) *server { return (*p.servers.Load())[gv] }

// Handles reports whether an aggregated server serves a group version.
func (p *Proxy) Handles(group, version string) bool {
	return p.serverFor(schema.GroupVersion{Group: group, Version: version}) != nil
}

// Serve forwards a request to the server of a group version.
func (p *Proxy) Serve(w http.ResponseWriter, req *http.Request, group, version string) {
	s := p.serverFor(schema.GroupVersion{Group: group, Version: version})
	u, ok := request.UserFrom(req.Context())
	switch {
	case s == nil || !s.Available || len(s.Addresses) == 0:
		fail(w, req, "service unavailable", http.StatusServiceUnavailable)
		return
	case s.err != nil:
		fail(w, req, s.err.Error(), http.StatusInternalServerError)
		return
	case !ok:
		fail(w, req, "missing user", http.StatusInternalServerError)
		return
	}
	location := s.urlFor(req.URL.Path)
	location.RawQuery = req.URL.Query().Encode()
	upgrades := httpstream.IsUpgradeRequest(req)
	if upgrades {
		var end func()
		w, req, end = upgrade.WithCloseCancel(w, req)
		defer end()
	}
	out, cancel := proxyutil.NewRequestForProxy(location, req)
	defer cancel()
	asUser := withUser(u, s.transport)
	if !upgrades && trace.SpanContextFromContext(req.Context()).IsSampled() { // otherwise the span would only cost time
		asUser = tracing.WrapperFor(otel.GetTracerProvider())(asUser)
	}
	asUser, end := egress.LimitHTML(asUser, identity.QuotaOwner(u, req.RemoteAddr))
	defer end()
	h := proxy.NewUpgradeAwareHandler(location, asUser, true, upgrades, unavailableResponder{})
	if upgrades { // the upgrade does not use the transport that adds the user's headers
		transport.SetAuthProxyHeaders(out, u.GetName(), uidOf(u), u.GetGroups(), u.GetExtra())
		upgraded, err := upgrade.Transport(req.Context(), s.transport)
		if err != nil {
			fail(w, req, err.Error(), http.StatusInternalServerError)
			return
		}
		h.UpgradeTransport = upgraded
	}
	h.RejectForwardingRedirects = p.config.RejectRedirects
	flowcontrol.RequestDelegated(req.Context()) // releases the seats of a watch
	h.ServeHTTP(w, out)
}

// urlFor returns the URL of a path at a random address of the server.
func (s *server) urlFor(path string) *url.URL {
	return &url.URL{Scheme: "https", Host: s.Addresses[rand.IntN(len(s.Addresses))], Path: path}
}

func withUser(u user.Info, rt http.RoundTripper) http.RoundTripper {
	return transport.NewAuthProxyRoundTripper(u.GetName(), uidOf(u), u.GetGroups(), u.GetExtra(), rt)
}

// uidOf returns the UID that aggregated servers receive.
func uidOf(u user.Info) string {
	if !utilfeature.DefaultFeatureGate.Enabled(features.RemoteRequestHeaderUID) {
		return ""
	}
	return u.GetUID()
}

// unavailableResponder writes 503 if a server is unreachable. kube-aggregator does not count it as a termination.
type unavailableResponder struct{}

// Error implements proxy.ErrorResponder.
func (unavailableResponder) Error(w http.ResponseWriter, _ *http.Request, err error) {
	http.Error(w, err.Error(), http.StatusServiceUnavailable)
}

// fail writes an error and counts it, as kube-aggregator does. The labels omit the resource and the path, because the
// client chooses them.
func fail(w http.ResponseWriter, req *http.Request, message string, code int) {
	http.Error(w, message, code)
	if info, ok := request.RequestInfoFrom(req.Context()); ok {
		endpointmetrics.RecordRequestTermination(req, &request.RequestInfo{
			IsResourceRequest: true,
			Verb:              info.Verb,
			APIGroup:          info.APIGroup,
			APIVersion:        info.APIVersion,
		}, "aggregator", code)
	}
}
