package authn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	coreinformers "k8s.io/client-go/informers/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
	serviceaccountcontroller "k8s.io/kubernetes/pkg/controller/serviceaccount"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/plugin/pkg/auth/authenticator/token/bootstrap"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/reload"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
)

// Service is a running authn.
type Service struct {
	authnv1.UnimplementedAuthnServer
	config    *Config
	auth      authenticator.Request
	audiences authenticator.Audiences
	// consultedHeaders are the front proxy's headers, for AuthenticateResponse.
	consultedHeaders []string
	cluster          *apiclient.Cluster
	tokenObjects     tokenObjects
	filtered         []cache.SharedIndexInformer
	files            reload.Files
	runners          []dynamiccertificates.ControllerRunner
	documents        *issuerDocuments
	ready            lifecycle.Readiness
}

// New builds the authenticators. cluster configures the client of the objects that they look up. Their clients of other
// servers end with ctx.
func New(ctx context.Context, c *Config, cluster *apiclient.Conn) (*Service, error) {
	serviceaccount.RegisterMetrics()
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
		var err error
		if accounts.ExternalPublicKeysGetter, err = externalKeys(ctx, accounts.Issuers, c.SigningEndpoint); err != nil {
			return nil, err
		}
	}
	if errs := c.Options.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	// authn's own cache of tokens, as kube-apiserver has it, must not outlive the gateway's.
	c.Options.TokenSuccessCacheTTL = min(c.Options.TokenSuccessCacheTTL, c.CacheTTL)
	ac, err := c.read()
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
	if err := s.configureLookups(cluster, &ac); err != nil {
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

// build builds the authenticators and watches their files.
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
			"--basic-auth-file is on: its passwords do not expire, and every reader of the file has them. Kubernetes "+
				"removed it in 1.19; use client certificates, OpenID Connect or service account tokens",
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

// keyListener empties the token cache when the keys change.
type keyListener struct{ *chain }

// Enqueue implements serviceaccount.Listener.
func (r keyListener) Enqueue() { r.resetTokenCache() }

// consultedHeaders returns the headers that contain a front proxy's identities.
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

// tokenSecrets and bootstrapSecrets select the secrets that tokens are looked up in. authn reads no other secrets.
const (
	tokenSecrets     = "type=" + string(corev1.SecretTypeServiceAccountToken)
	bootstrapSecrets = "type=" + string(bootstrapapi.SecretTypeBootstrapToken)
)

// configureLookups builds the informers and clients for token authentication.
func (s *Service) configureLookups(cluster *apiclient.Conn, ac *kubeauthenticator.Config) (err error) {
	if s.cluster, err = apiclient.NewCluster(cluster, s.config.Freshness, trim); err != nil {
		return err
	}
	client := s.cluster.Client
	accounts := s.cluster.Informers.Core().V1().ServiceAccounts()
	s.cluster.TrackAge("/api/v1/serviceaccounts", "", accounts.Informer())
	// Pods and nodes are read on demand when a token is bound to one, because an informer would cache every pod of the
	// cluster.
	emptyIndexer := func() cache.Indexer { return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}) }
	tokens, err := s.secretLister("", tokenSecrets, func(obj any) (any, error) {
		trim(obj)
		return obj, nil
	})
	if err != nil {
		return err
	}
	s.tokenObjects.ServiceAccountTokenGetter = serviceaccountcontroller.NewGetterFromClient(client,
		tokens, accounts.Lister(),
		corelisters.NewPodLister(emptyIndexer()), corelisters.NewNodeLister(emptyIndexer()))
	ac.ServiceAccountTokenGetter = &s.tokenObjects
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

// secretLister caches the Secrets that a field selector selects, in a namespace or in all. transform may trim them.
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

// Register registers the service with g.
func (s *Service) Register(g grpc.ServiceRegistrar) { authnv1.RegisterAuthnServer(g, s) }

// Collectors returns the service's own metrics; upstream's register themselves.
func (s *Service) Collectors() []prometheus.Collector {
	return []prometheus.Collector{attempts, deprecated}
}

// Files serves the status of the files that are reloaded at run time.
func (s *Service) Files() http.Handler { return &s.files }

// Ready returns a readiness without conditions. Certificates and static tokens need nothing of the cluster, and authn
// itself reaches the gateway with a certificate.
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
	return s.cluster.Run(ctx, func(stop <-chan struct{}) {
		for _, i := range s.filtered {
			go i.Run(stop)
		}
	})
}
