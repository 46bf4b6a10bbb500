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
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	apiserverserviceaccount "k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	serviceaccountcontroller "k8s.io/kubernetes/pkg/controller/serviceaccount"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/plugin/pkg/auth/authenticator/token/bootstrap"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/reload"
	"watershed.dev/platform/warnings"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
)

// Config is what authn is told: kube-apiserver's authentication flags, and how to reach the gateway.
type Config struct {
	Options    *kubeoptions.BuiltInAuthenticationOptions
	Kubeconfig string
	// ServicesCAFile is the authority of authn's, authz's and admission's own client certificates; empty: they are
	// signed by the cluster's.
	ServicesCAFile string
	// BasicAuthFile has users and their passwords; empty: nobody is known by a password.
	BasicAuthFile string
	// SigningEndpoint is the socket of an external signer of service account tokens, which tells the keys.
	SigningEndpoint string
	// CacheTTL is how long callers may keep an answer. A token or certificate that is revoked works on for that long.
	CacheTTL  time.Duration
	Freshness apiclient.Freshness
	Egress    egress.Config
}

// NewConfig returns the defaults.
func NewConfig() *Config {
	return &Config{Options: kubeoptions.NewBuiltInAuthenticationOptions().WithAll()}
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, false)
	c.Options.AddFlags(fs)
	c.Freshness.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"How to reach the gateway, for what token authentication must look up.")
	fs.StringVar(&c.ServicesCAFile, "services-client-ca-file", "",
		"The certificate authority of authn's, authz's and admission's client certificates. Empty: --client-ca-file "+
			"signs them. Nobody else is known by it.")
	fs.StringVar(&c.BasicAuthFile, "basic-auth-file", "",
		"A file of users who are known by HTTP basic authentication, a line each: "+
			"password,user,uid[,\"group1,group2\"]. "+
			"A password may be a bcrypt hash. Kubernetes removed this in 1.19: passwords of files do not expire. "+
			"Off unless it is given.")
	fs.StringVar(&c.SigningEndpoint, "service-account-signing-endpoint", "",
		"Path to the socket where an external JWT signer is listening. This flag is mutually exclusive with "+
			"--service-account-signing-key-file and --service-account-key-file.")
	fs.DurationVar(&c.CacheTTL, "authentication-cache-ttl", 10*time.Second,
		"How long a gateway may reuse an answer for the same credentials.")
}

// Service is a running authn.
type Service struct {
	authnv1.UnimplementedAuthnServer
	config    *Config
	auth      authenticator.Request
	audiences authenticator.Audiences
	// consultedHeaders are the front proxy's headers, as AuthenticateResponse has them.
	consultedHeaders []string
	cluster          *apiclient.Cluster
	filtered         []cache.SharedIndexInformer
	files            reload.Files
	runners          []dynamiccertificates.ControllerRunner
	documents        *issuerDocuments
	ready            lifecycle.Readiness
}

// New builds the authenticators. What asks other servers lives as long as ctx.
func New(ctx context.Context, c *Config) (*Service, error) {
	s := &Service{
		config:           c,
		audiences:        c.Options.APIAudiences,
		consultedHeaders: consultedHeaders(c.Options.RequestHeader),
	}
	accounts := c.Options.ServiceAccounts
	if accounts != nil && len(s.audiences) == 0 {
		s.audiences = accounts.Issuers
	}
	if accounts != nil && c.SigningEndpoint != "" {
		if len(accounts.KeyFiles) > 0 {
			return nil, fmt.Errorf("--service-account-key-file %q cannot be given with "+
				"--service-account-signing-endpoint: "+
				"the signer tells its keys; leave the former out", accounts.KeyFiles)
		}
		var err error
		if accounts.ExternalPublicKeysGetter, err = externalKeys(ctx, accounts.Issuers, c.SigningEndpoint); err != nil {
			return nil, err
		}
	}
	if errs := c.Options.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	ac, err := c.Options.ToAuthenticationConfig()
	if err != nil {
		return nil, err
	}
	ac.APIServerID = serverID
	out, err := c.Egress.Open()
	if err != nil {
		return nil, err
	}
	ac.CustomDial, ac.EgressLookup = out.ControlPlane(), out.Lookup()
	if accounts != nil && len(accounts.KeyFiles) > 0 {
		if ac.ServiceAccountPublicKeysGetter, err = newKeyFiles(ctx, accounts.KeyFiles, &s.files); err != nil {
			return nil, err
		}
	}
	if err := s.configureLookups(c, &ac); err != nil {
		return nil, err
	}
	if err := s.build(ctx, &ac); err != nil {
		return nil, err
	}
	if accounts != nil && len(accounts.Issuers) > 0 && ac.ServiceAccountPublicKeysGetter != nil {
		s.documents = &issuerDocuments{
			issuer: accounts.Issuers[0],
			jwks:   accounts.JWKSURI,
			keys:   ac.ServiceAccountPublicKeysGetter,
		}
	}
	return s, nil
}

// build makes the authenticators, and follows their files.
func (s *Service) build(ctx context.Context, ac *kubeauthenticator.Config) error {
	c := s.config
	if ac.ClientCAContentProvider != nil {
		s.addRunner(ac.ClientCAContentProvider)
	}
	if ac.RequestHeaderConfig != nil && ac.RequestHeaderConfig.CAContentProvider != nil {
		s.addRunner(ac.RequestHeaderConfig.CAContentProvider)
	}
	chain, all, err := newChain(ctx, *ac, c.BasicAuthFile, &s.files)
	if err != nil {
		return fmt.Errorf("authenticators: %w", err)
	}
	s.auth = all
	if keys := ac.ServiceAccountPublicKeysGetter; keys != nil {
		keys.AddListener(keyListener{chain})
	}
	if c.BasicAuthFile != "" {
		deprecated.WithLabelValues("basic").Set(1)
		slog.Warn(
			"--basic-auth-file is on: its passwords do not expire, and whoever reads the file has them. Kubernetes "+
				"removed it in 1.19; take client certificates, OpenID Connect or tokens of service accounts",
			"file",
			c.BasicAuthFile,
		)
	}
	if c.ServicesCAFile != "" {
		serviceAuth, err := newServiceAuthenticator(c.ServicesCAFile, s.auth)
		if err != nil {
			return err
		}
		s.auth = serviceAuth
		s.addRunner(serviceAuth.authority)
	}
	if oidc := c.Options.OIDC; oidc != nil {
		if err := chain.watchIssuerCA(&s.files, oidc.CAFile, c.Options.ToAuthenticationConfig); err != nil {
			return err
		}
	}
	newConfigFile(c.Options.AuthenticationConfigFile, ac, chain).watch(&s.files)
	return nil
}

// keyListener forgets what tokens were found to be when the keys change.
type keyListener struct{ *chain }

// Enqueue implements serviceaccount.Listener.
func (r keyListener) Enqueue() { r.resetTokenCache() }

// consultedHeaders are the headers that a front proxy's identities come in.
func consultedHeaders(o *genericoptions.RequestHeaderAuthenticationOptions) []string {
	if o == nil || o.ClientCAFile == "" {
		return nil
	}
	all := slices.Concat(o.UsernameHeaders, o.UIDHeaders, o.GroupHeaders)
	for _, p := range o.ExtraHeaderPrefixes {
		all = append(all, p+"*")
	}
	return all
}

// tokenSecrets and bootstrapSecrets select the secrets that tokens are looked up in; no other secret of the cluster
// comes here.
const (
	tokenSecrets     = "type=" + string(corev1.SecretTypeServiceAccountToken)
	bootstrapSecrets = "type=" + string(bootstrapapi.SecretTypeBootstrapToken)
)

// configureLookups gives token authentication its view of the cluster.
func (s *Service) configureLookups(c *Config, ac *kubeauthenticator.Config) error {
	rc, err := apiclient.Config(c.Kubeconfig, "authn")
	if err != nil {
		return err
	}
	if s.cluster, err = apiclient.NewCluster(rc, c.Freshness); err != nil {
		return err
	}
	client := s.cluster.Client
	accounts := s.cluster.Informers.Core().V1().ServiceAccounts()
	if err := accounts.Informer().SetTransform(trim); err != nil {
		return err
	}
	s.cluster.TrackAge("/api/v1/serviceaccounts", "", accounts.Informer())
	// Pods and nodes are asked for when a token is bound to one: an informer would hold every pod of the cluster.
	emptyIndexer := func() cache.Indexer { return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}) }
	tokens, err := s.secretLister("", tokenSecrets, trim)
	if err != nil {
		return err
	}
	ac.ServiceAccountTokenGetter = serviceaccountcontroller.NewGetterFromClient(client,
		tokens, accounts.Lister(),
		corelisters.NewPodLister(emptyIndexer()), corelisters.NewNodeLister(emptyIndexer()))
	ac.SecretsWriter = client.CoreV1()
	if ac.BootstrapToken {
		tokens, err := s.secretLister(metav1.NamespaceSystem, bootstrapSecrets, nil)
		if err != nil {
			return err
		}
		ac.BootstrapTokenAuthenticator = bootstrap.NewTokenAuthenticator(tokens.Secrets(metav1.NamespaceSystem))
	}
	return nil
}

// secretLister caches the Secrets of a namespace, or of all, that a field selector selects. transform may shorten them.
func (s *Service) secretLister(
	namespace, selector string,
	transform cache.TransformFunc,
) (corelisters.SecretLister, error) {
	i := coreinformers.NewFilteredSecretInformer(s.cluster.Client, namespace, 0,
		cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc},
		func(o *metav1.ListOptions) { o.FieldSelector = selector })
	if err := i.SetTransform(transform); err != nil {
		return nil, err
	}
	path := "/api/v1/secrets"
	if namespace != "" {
		path = "/api/v1/namespaces/" + namespace + "/secrets"
	}
	s.cluster.TrackAge(path, "fieldSelector="+url.QueryEscape(selector), i)
	s.filtered = append(s.filtered, i)
	return corelisters.NewSecretLister(i.GetIndexer()), nil
}

func (s *Service) addRunner(p any) {
	if r, ok := p.(dynamiccertificates.ControllerRunner); ok {
		s.runners = append(s.runners, r)
	}
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { authnv1.RegisterAuthnServer(g, s) }

// Collectors are the service's own metrics; upstream's register themselves.
func (s *Service) Collectors() []prometheus.Collector {
	return []prometheus.Collector{attempts, deprecated}
}

// Files are those that are read anew while the service runs.
func (s *Service) Files() http.Handler { return &s.files }

// Ready is so from the start: certificates and static tokens need nothing of the cluster, and it is with a
// certificate that authn itself comes to the gateway.
func (s *Service) Ready() *lifecycle.Readiness { return &s.ready }

// Run keeps certificates and lookups fresh until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	for _, r := range s.runners {
		if err := r.RunOnce(ctx); err != nil {
			return err
		}
		go r.Run(ctx, 1)
	}
	go s.files.Run(ctx)
	for _, i := range s.filtered {
		go i.Run(ctx.Done())
	}
	return s.cluster.Run(ctx)
}

// Authenticate implements authnv1.AuthnServer.
func (s *Service) Authenticate(ctx context.Context,
	r *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse, error) {
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
	out, u, err := s.authenticate(req, nil)
	if err != nil || !out.Authenticated {
		return out, err
	}
	if !identity.IsAnonymous(u) {
		var certificates []*x509.Certificate
		if req.TLS != nil {
			certificates = req.TLS.PeerCertificates
		}
		out.CacheMilliseconds = s.cacheTTL(r, certificates).Milliseconds()
	}
	if len(r.PeerCertificates) > 0 {
		out.ConsultedHeaders = s.consultedHeaders
	}
	s.removeCredentials(req.Header)
	out.ReplacedHeaders = replacedHeaders(before, req.Header)
	return out, nil
}

// checkFresh refuses a user whom only a look into the cluster could vouch for, where what is known of the cluster is too
// old: a token may have been revoked. Certificates, static tokens and other issuers' do not depend on it, and the
// services of the system come with certificates.
func (s *Service) checkFresh(u user.Info) error {
	if !strings.HasPrefix(u.GetName(), apiserverserviceaccount.ServiceAccountUsernamePrefix) &&
		!strings.HasPrefix(u.GetName(), bootstrapapi.BootstrapUserPrefix) {
		return nil
	}
	if err := s.cluster.Err(); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// ReviewToken implements authnv1.AuthnServer. An empty token is nobody's; the answer says whether others could be
// looked up.
func (s *Service) ReviewToken(ctx context.Context,
	r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	if err := s.cluster.Err(); r.Token == "" && err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	req := (&http.Request{
		URL:    &url.URL{},
		Header: http.Header{"Authorization": {"Bearer " + r.Token}},
	}).WithContext(ctx)
	out, _, err := s.authenticate(req, r.Audiences)
	return out, err
}

// authenticate has the authenticators say whose a request is, for an audience; none is the API's own. The error is that nobody
// can say.
func (s *Service) authenticate(
	req *http.Request,
	audiences []string,
) (*authnv1.AuthenticateResponse, user.Info, error) {
	if len(audiences) == 0 {
		audiences = s.audiences
	}
	if len(audiences) > 0 {
		req = req.WithContext(authenticator.WithAudiences(req.Context(), audiences))
	}
	ctx, warned := warnings.WithRecorder(audit.WithAuditContext(req.Context()))
	resp, ok, err := s.auth.AuthenticateRequest(req.WithContext(ctx))
	if !ok && errors.Is(err, errBusy) { // nobody has looked at the password: it is not wrong
		return nil, nil, status.Error(codes.Unavailable, errBusy.Error())
	}
	out := &authnv1.AuthenticateResponse{Authenticated: ok, Warnings: warned.List()}
	out.AuditAnnotations = audit.AuditContextFrom(ctx).GetEventAnnotations()
	if err != nil {
		out.Error = err.Error()
	}
	if !ok {
		if s.config.BasicAuthFile != "" {
			out.Challenge = challenge
		}
		return out, nil, nil
	}
	if err := s.checkFresh(resp.User); err != nil {
		return nil, nil, err
	}
	out.User, out.Audiences = identity.UserProto(resp.User), resp.Audiences
	return out, resp.User, nil
}

// IssuerDocument implements authnv1.AuthnServer.
func (s *Service) IssuerDocument(_ context.Context,
	r *authnv1.IssuerDocumentRequest) (*authnv1.IssuerDocumentResponse, error) {
	if s.documents == nil {
		return nil, status.Error(codes.NotFound, "no service account issuer")
	}
	metadata, err := s.documents.metadataFor(r.ExternalAddress)
	if err != nil {
		return nil, status.Error(codes.NotFound, err.Error())
	}
	if r.Path == serviceaccount.OpenIDConfigPath {
		body, age := metadata.GetConfigJSON()
		return &authnv1.IssuerDocumentResponse{
			Body:          body,
			ContentType:   "application/json",
			MaxAgeSeconds: int64(age),
		}, nil
	}
	body, age := metadata.GetKeysetJSON()
	return &authnv1.IssuerDocumentResponse{
		Body:          body,
		ContentType:   "application/jwk-set+json",
		MaxAgeSeconds: int64(age),
	}, nil
}
