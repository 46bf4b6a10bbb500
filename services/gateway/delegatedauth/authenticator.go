package delegatedauth

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	_ "k8s.io/apiserver/pkg/authentication/request/x509" // apiserver_client_certificate_expiration_seconds
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/component-base/metrics"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/warnings"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// rpcTimeout bounds a call to authn or authz, and so does the request's deadline. A single webhook has 30 s
// (k8s.io/apiserver/pkg/util/webhook), and authz then applies its failurePolicy. With several slow webhooks, the call
// ends first. The wait for a ready replica is shorter (rpc.WithMaxWait).
const rpcTimeout = 35 * time.Second

const (
	// authnCacheBytes bounds the cached users in bytes, and authnOwnerBytes the entries of each user.
	authnCacheBytes = 32 << 20
	authnOwnerBytes = 1 << 20
)

var (
	cacheBytes = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_gateway_auth_cache_bytes",
		Help: "Bytes of cached responses of authn and authz, by service.",
	}, []string{"service"})
	reauthorizationTimeouts = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_reauthorization_timeouts_total",
		Help: "Open watches that ended because authz did not confirm their permission in time.",
	})
)

// Metrics returns the collectors of the package.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{cacheBytes, reauthorizationTimeouts}
}

// Authenticator calls authn and caches its responses for the time that authn sets. Unauthenticated clients leave no
// state: it caches no refusals and no anonymous users.
type Authenticator struct {
	client authnv1.AuthnClient
	// RejectsAnonymous reports whether anonymous users are rejected although authn accepts them. nil: they are not.
	RejectsAnonymous func() bool
	// headerNames and headerPrefixes select the front proxy's headers, which carry an identity besides Authorization.
	headerNames, headerPrefixes []string
	users                       *cache[*cachedUser]
}

// NewAuthenticator returns an authenticator. Besides credentials it passes to authn the headers with the given names or
// name prefixes.
func NewAuthenticator(client authnv1.AuthnClient, names, prefixes []string) *Authenticator {
	return &Authenticator{
		client:         client,
		headerNames:    names,
		headerPrefixes: prefixes,
		users:          newCache[*cachedUser](authnCacheBytes, authnOwnerBytes, cacheBytes.WithLabelValues("authn")),
	}
}

// cachedUser is a response of authn. It is immutable.
type cachedUser struct {
	response *authenticator.Response
	// replacedHeaders are new values of headers. A header without values is removed.
	replacedHeaders map[string][]string
	// consultedHeaders are the headers that authn reads but this gateway does not pass to it.
	consultedHeaders []string
	warnings         []string
	// annotations are for each request's audit event.
	annotations map[string]string
}

// AuthenticateRequest implements authenticator.Request. It fails closed: it returns an error if authn does not respond.
func (a *Authenticator) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	r := a.authenticateRequest(req)
	key, cacheable := requestKey(r)
	if cacheable {
		if k, ok := a.users.get(key); ok {
			observeCertificate(req)
			return a.completeRequest(req, k)
		}
	}
	ctx, cancel := context.WithTimeout(req.Context(), rpcTimeout)
	defer cancel()
	resp, err := a.client.Authenticate(ctx, r)
	if err != nil {
		return nil, false, rpc.FromStatus(err)
	}
	if !resp.Authenticated {
		warnings.Forward(req.Context(), resp.Warnings)
		audit.AddAuditAnnotationsMap(req.Context(), resp.AuditAnnotations)
		if resp.Challenge != "" {
			*req = *req.WithContext(context.WithValue(req.Context(), challengeKey{}, resp.Challenge))
		}
		if resp.Error != "" {
			return nil, false, errors.New(resp.Error)
		}
		return nil, false, nil
	}
	k := &cachedUser{
		response:    &authenticator.Response{User: identity.User(resp.User), Audiences: resp.Audiences},
		warnings:    resp.Warnings,
		annotations: resp.AuditAnnotations,
	}
	size := userBytes(k.response.User)
	for key, value := range k.annotations {
		size += 64 + len(key) + len(value)
	}
	for _, w := range k.warnings {
		size += len(w)
	}
	for name, v := range resp.ReplacedHeaders {
		if k.replacedHeaders == nil {
			k.replacedHeaders = map[string][]string{}
		}
		k.replacedHeaders[name] = v.GetValues()
		for _, s := range v.GetValues() {
			size += len(s)
		}
	}
	for _, h := range resp.ConsultedHeaders {
		if !a.forwardsHeader(h) {
			k.consultedHeaders = append(k.consultedHeaders, h)
		}
	}
	if cacheable && resp.CacheMilliseconds > 0 && !identity.IsAnonymous(k.response.User) {
		a.users.put(key, identity.Owner(k.response.User.GetName()), k, size,
			time.Now().Add(time.Duration(resp.CacheMilliseconds)*time.Millisecond))
	}
	return a.completeRequest(req, k)
}

// observeCertificate records the remaining lifetime of a request's client certificate. authn records it if it
// authenticates the request.
func observeCertificate(req *http.Request) {
	if req.TLS != nil && len(req.TLS.PeerCertificates) > 0 {
		certificateExpiration().Observe(time.Until(req.TLS.PeerCertificates[0].NotAfter).Seconds())
	}
}

// certificateExpiration returns the histogram of k8s.io/apiserver/pkg/authentication/request/x509.
var certificateExpiration = sync.OnceValue(func() *metrics.Histogram {
	return telemetry.UpstreamMetric(metrics.NewHistogram(&metrics.HistogramOpts{
		Namespace:      "apiserver",
		Subsystem:      "client",
		Name:           "certificate_expiration_seconds",
		Help:           "Distribution of the remaining lifetime on the certificate used to authenticate a request.",
		StabilityLevel: metrics.ALPHA,
	}))
})

type challengeKey struct{}

// Challenge returns the value of WWW-Authenticate for an unauthenticated request, or "".
func Challenge(ctx context.Context) string {
	c, _ := ctx.Value(challengeKey{}).(string)
	return c
}

type impersonatesKey struct{}

// impersonates reports whether the client of a request has authenticated and impersonates a user. That user may be
// anonymous.
func impersonates(ctx context.Context) bool {
	return ctx.Value(impersonatesKey{}) != nil
}

// Detached returns a context for Reauthorize that outlives the request of ctx. It has only the values of ctx that
// Reauthorize reads.
func Detached(ctx context.Context) context.Context {
	detached := context.Background()
	for _, key := range []any{impersonatesKey{}, ownAuthorizerKey{}} {
		if v := ctx.Value(key); v != nil {
			detached = context.WithValue(detached, key, v)
		}
	}
	return detached
}

// authenticateRequest returns the parts of a request that authn reads.
func (a *Authenticator) authenticateRequest(req *http.Request) *authnv1.AuthenticateRequest {
	r := &authnv1.AuthenticateRequest{Path: req.URL.Path, Headers: map[string]*commonv1.Values{}}
	add := func(name string) {
		if v := req.Header.Values(name); len(v) > 0 {
			r.Headers[name] = &commonv1.Values{Values: v}
		}
	}
	add("Authorization")
	if slices.ContainsFunc(req.Header.Values("Sec-Websocket-Protocol"), func(v string) bool {
		return strings.Contains(v, "base64url.bearer")
	}) {
		add("Sec-Websocket-Protocol")
		add("Connection")
		add("Upgrade")
	}
	if len(a.headerNames)+len(a.headerPrefixes) > 0 {
		for name := range req.Header {
			if a.forwardsHeader(name) {
				add(name)
			}
		}
	}
	if req.TLS != nil {
		for _, c := range req.TLS.PeerCertificates {
			r.PeerCertificates = append(r.PeerCertificates, c.Raw)
		}
	}
	return r
}

// requestKey returns the key of a cacheable response. It covers everything that the response depends on. ok is false
// for a request without credentials.
func requestKey(r *authnv1.AuthenticateRequest) (key digest, ok bool) {
	if len(r.Headers) == 0 && len(r.PeerCertificates) == 0 {
		return key, false
	}
	d := newDigester()
	d.number(len(r.PeerCertificates))
	for _, c := range r.PeerCertificates {
		d.part(string(c))
	}
	names := make([]string, 0, len(r.Headers))
	for name := range r.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		d.part(name)
		d.number(len(r.Headers[name].Values))
		for _, v := range r.Headers[name].Values {
			d.part(v)
		}
	}
	return d.sum()
}

func userBytes(u user.Info) int {
	n := 200 + len(u.GetName()) + len(u.GetUID())
	for _, g := range u.GetGroups() {
		n += len(g) + 16
	}
	for k, all := range u.GetExtra() {
		n += len(k) + 64
		for _, v := range all {
			n += len(v) + 16
		}
	}
	return n
}

// completeRequest removes credentials from the request's headers, so that they are not forwarded. It adds warnings and
// audit annotations.
func (a *Authenticator) completeRequest(req *http.Request, k *cachedUser) (*authenticator.Response, bool, error) {
	if identity.IsAnonymous(k.response.User) {
		if a.RejectsAnonymous != nil && a.RejectsAnonymous() {
			return nil, false, nil
		}
	} else if len(req.Header[authenticationv1.ImpersonateUserHeader]) > 0 {
		*req = *req.WithContext(context.WithValue(req.Context(), impersonatesKey{}, true))
	}
	for _, h := range k.consultedHeaders {
		for name := range req.Header {
			if matchesHeader(h, name) && !a.forwardsHeader(name) {
				return nil, false, fmt.Errorf("authn reads the header %q, which this gateway does not pass on: set "+
					"the same --requestheader-* flags on both", name)
			}
		}
	}
	for name, values := range k.replacedHeaders {
		if len(values) == 0 {
			req.Header.Del(name)
		} else {
			req.Header[http.CanonicalHeaderKey(name)] = slices.Clone(values)
		}
	}
	warnings.Forward(req.Context(), k.warnings)
	if len(k.annotations) > 0 {
		audit.AddAuditAnnotationsMap(req.Context(), k.annotations)
	}
	return &authenticator.Response{User: k.response.User, Audiences: k.response.Audiences}, true, nil
}

// forwardsHeader reports whether this gateway passes a header to authn. A final * makes header a prefix, and then all
// headers with that prefix must be passed.
func (a *Authenticator) forwardsHeader(header string) bool {
	if prefix, ok := strings.CutSuffix(header, "*"); ok {
		return slices.ContainsFunc(a.headerPrefixes, func(p string) bool { return matchesHeader(p+"*", prefix) })
	}
	return slices.ContainsFunc(a.headerNames, func(n string) bool { return strings.EqualFold(n, header) }) ||
		slices.ContainsFunc(a.headerPrefixes, func(p string) bool { return matchesHeader(p+"*", header) })
}

// matchesHeader reports whether name equals pattern or, with a final *, begins with it. Case does not matter.
func matchesHeader(pattern, name string) bool {
	prefix, ok := strings.CutSuffix(pattern, "*")
	if !ok {
		return strings.EqualFold(pattern, name)
	}
	return len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix)
}
