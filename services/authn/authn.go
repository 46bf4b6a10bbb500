// Package authn answers who a request comes from. The authenticators are kube-apiserver's own, built from its own
// options; what they need to know of the cluster (service accounts, pods, nodes) they read as a client of the gateway.
package authn

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/keyutil"
	serviceaccountcontroller "k8s.io/kubernetes/pkg/controller/serviceaccount"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/plugin/pkg/auth/authenticator/token/bootstrap"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/features"
	"watershed.dev/platform/identity"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
)

// Config is what authn is told: kube-apiserver's authentication flags, and how to reach the gateway.
type Config struct {
	Options    *kubeoptions.BuiltInAuthenticationOptions
	Kubeconfig string
	// CacheTTL is how long callers may keep an answer. A token or certificate that is revoked works on for that long.
	CacheTTL time.Duration
}

// NewConfig returns the defaults.
func NewConfig() *Config {
	return &Config{Options: kubeoptions.NewBuiltInAuthenticationOptions().WithAll()}
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, true)
	c.Options.AddFlags(fs)
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "How to reach the gateway, for what token authentication must look up.")
	fs.DurationVar(&c.CacheTTL, "authentication-cache-ttl", 10*time.Second, "How long a gateway may reuse an answer for the same credentials.")
}

// Service is a running authn.
type Service struct {
	authnv1.UnimplementedAuthnServer
	config    *Config
	auth      authenticator.Request
	audiences authenticator.Audiences
	informers informers.SharedInformerFactory
	runners   []dynamiccertificates.ControllerRunner
	metadata  serviceaccount.OpenIDMetadataProvider
}

// New builds the authenticators.
func New(ctx context.Context, c *Config) (*Service, error) {
	if errs := c.Options.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	s := &Service{config: c, audiences: c.Options.APIAudiences}
	if len(s.audiences) == 0 && c.Options.ServiceAccounts != nil {
		s.audiences = c.Options.ServiceAccounts.Issuers
	}
	ac, err := c.Options.ToAuthenticationConfig()
	if err != nil {
		return nil, err
	}
	if err := s.lookups(c, &ac); err != nil {
		return nil, err
	}
	if ac.ClientCAContentProvider != nil {
		s.run(ac.ClientCAContentProvider)
	}
	if ac.RequestHeaderConfig != nil && ac.RequestHeaderConfig.CAContentProvider != nil {
		s.run(ac.RequestHeaderConfig.CAContentProvider)
	}
	if s.auth, _, _, _, err = ac.New(ctx); err != nil {
		return nil, fmt.Errorf("authenticators: %w", err)
	}
	return s, s.issuer()
}

// lookups gives token authentication its view of the cluster.
func (s *Service) lookups(c *Config, ac *kubeauthenticator.Config) error {
	rc, err := apiclient.Config(c.Kubeconfig, "authn")
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(apiclient.Protobuf(rc))
	if err != nil {
		return err
	}
	s.informers = apiclient.Informers(client)
	core := s.informers.Core().V1()
	// Pods and nodes are asked for when a token is bound to one: an informer would hold every pod of the cluster.
	none := func() cache.Indexer { return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}) }
	ac.ServiceAccountTokenGetter = serviceaccountcontroller.NewGetterFromClient(client, core.Secrets().Lister(), core.ServiceAccounts().Lister(),
		corelisters.NewPodLister(none()), corelisters.NewNodeLister(none()))
	ac.SecretsWriter = client.CoreV1()
	if ac.BootstrapToken {
		ac.BootstrapTokenAuthenticator = bootstrap.NewTokenAuthenticator(core.Secrets().Lister().Secrets("kube-system"))
	}
	return nil
}

func (s *Service) run(p any) {
	if r, ok := p.(dynamiccertificates.ControllerRunner); ok {
		s.runners = append(s.runners, r)
	}
}

// issuer prepares the service account issuer's OpenID documents, where its URL allows them.
func (s *Service) issuer() error {
	o := s.config.Options.ServiceAccounts
	if o == nil || len(o.Issuers) == 0 || len(o.KeyFiles) == 0 {
		return nil
	}
	var keys []any
	for _, f := range o.KeyFiles {
		k, err := keyutil.PublicKeysFromFile(f)
		if err != nil {
			return fmt.Errorf("--service-account-key-file %q: %w", f, err)
		}
		keys = append(keys, k...)
	}
	getter, err := serviceaccount.StaticPublicKeysGetter(keys)
	if err != nil {
		return err
	}
	jwks := o.JWKSURI
	external := ""
	if jwks == "" {
		if u, err := url.Parse(o.Issuers[0]); err == nil {
			external = u.Host
		}
	}
	md, err := serviceaccount.NewOpenIDMetadataProvider(o.Issuers[0], jwks, external, getter)
	if err != nil {
		slog.Info("No OpenID documents for the service account issuer", "issuer", o.Issuers[0], "reason", err)
		return nil
	}
	s.metadata = md
	return nil
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { authnv1.RegisterAuthnServer(g, s) }

// Collectors are the service's own metrics; upstream's register themselves.
func (s *Service) Collectors() []prometheus.Collector { return nil }

// Ready is nil from the beginning: certificates and static tokens need nothing of the cluster, and it is with a
// certificate that authn itself comes to the gateway.
func (s *Service) Ready(context.Context) error { return nil }

// Run keeps certificates and lookups fresh until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	for _, r := range s.runners {
		if err := r.RunOnce(ctx); err != nil {
			return err
		}
		go r.Run(ctx, 1)
	}
	s.informers.Start(ctx.Done())
	<-ctx.Done()
	s.informers.Shutdown()
	return nil
}

// Authenticate implements authnv1.AuthnServer.
func (s *Service) Authenticate(ctx context.Context, r *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse, error) {
	req := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: r.Path}, Header: http.Header{}}).WithContext(ctx)
	for name, v := range r.Headers {
		req.Header[textproto.CanonicalMIMEHeaderKey(name)] = append([]string{}, v.Values...)
	}
	if len(r.PeerCertificates) > 0 {
		req.TLS = &tls.ConnectionState{}
		for _, der := range r.PeerCertificates {
			cert, err := x509.ParseCertificate(der)
			if err != nil {
				return &authnv1.AuthenticateResponse{Error: "x509: " + err.Error()}, nil
			}
			req.TLS.PeerCertificates = append(req.TLS.PeerCertificates, cert)
		}
	}
	before := req.Header.Clone()
	audiences := s.audiences
	if len(r.Audiences) > 0 {
		audiences = r.Audiences
	}
	if len(audiences) > 0 {
		req = req.WithContext(authenticator.WithAudiences(ctx, audiences))
	}
	resp, ok, err := s.auth.AuthenticateRequest(req)
	out := &authnv1.AuthenticateResponse{Authenticated: ok}
	if err != nil {
		out.Error = err.Error()
	}
	if !ok {
		return out, nil
	}
	out.User, out.Audiences = identity.UserProto(resp.User), resp.Audiences
	out.CacheMilliseconds = s.cacheable(r).Milliseconds()
	for name := range before {
		if _, still := req.Header[name]; !still || name == "Authorization" {
			out.ConsumedHeaders = append(out.ConsumedHeaders, name)
		}
	}
	s.dropFrontProxy(before, out)
	return out, nil
}

// dropFrontProxy takes a front proxy's headers out of every authenticated request: only the proxy may send them.
func (s *Service) dropFrontProxy(h http.Header, out *authnv1.AuthenticateResponse) {
	o := s.config.Options.RequestHeader
	if o == nil {
		return
	}
	left := h.Clone()
	headerrequest.ClearAuthenticationHeaders(left, headerrequest.StaticStringSlice(o.UsernameHeaders), headerrequest.StaticStringSlice(o.UIDHeaders),
		headerrequest.StaticStringSlice(o.GroupHeaders), headerrequest.StaticStringSlice(o.ExtraHeaderPrefixes))
	for name := range h {
		if _, ok := left[name]; !ok {
			out.ConsumedHeaders = append(out.ConsumedHeaders, name)
		}
	}
}

// cacheable is how long an answer may be kept. Bound service account tokens end with what they are bound to, so those
// are kept for a second only.
func (s *Service) cacheable(r *authnv1.AuthenticateRequest) time.Duration {
	if v := r.Headers["Authorization"]; v != nil && len(v.Values) > 0 && strings.HasPrefix(v.Values[0], "Bearer ey") {
		return min(s.config.CacheTTL, time.Second)
	}
	return s.config.CacheTTL
}

// ReviewToken implements authnv1.AuthnServer.
func (s *Service) ReviewToken(ctx context.Context, r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	req := (&http.Request{URL: &url.URL{}, Header: http.Header{"Authorization": {"Bearer " + r.Token}}}).WithContext(ctx)
	audiences := s.audiences
	if len(r.Audiences) > 0 {
		audiences = r.Audiences
	}
	if len(audiences) > 0 {
		req = req.WithContext(authenticator.WithAudiences(ctx, audiences))
	}
	resp, ok, err := s.auth.AuthenticateRequest(req)
	out := &authnv1.AuthenticateResponse{Authenticated: ok}
	if err != nil {
		out.Error = err.Error()
	}
	if ok {
		out.User, out.Audiences = identity.UserProto(resp.User), resp.Audiences
	}
	return out, nil
}

// IssuerDocument implements authnv1.AuthnServer.
func (s *Service) IssuerDocument(_ context.Context, r *authnv1.IssuerDocumentRequest) (*authnv1.IssuerDocumentResponse, error) {
	if s.metadata == nil {
		return nil, status.Error(codes.NotFound, "no service account issuer")
	}
	if r.Path == serviceaccount.OpenIDConfigPath {
		body, age := s.metadata.GetConfigJSON()
		return &authnv1.IssuerDocumentResponse{Body: body, ContentType: "application/json", MaxAgeSeconds: int64(age)}, nil
	}
	body, age := s.metadata.GetKeysetJSON()
	return &authnv1.IssuerDocumentResponse{Body: body, ContentType: "application/jwk-set+json", MaxAgeSeconds: int64(age)}, nil
}
