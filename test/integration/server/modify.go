package server

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapiserver "k8s.io/apiserver/pkg/server"
	serverstore "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"
	"k8s.io/kubernetes/pkg/kubeapiserver"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

// Skip skips a test that is no black box.
func Skip(t T, reason string) { t.Skipf("not a black box: %s", reason) }

// FrontProxy is the CA of the request header authentication, which the bridge to a test's authenticator needs.
type FrontProxy struct {
	CA  *x509.Certificate
	Key crypto.Signer
}

// Bridges are the parts of a server that a test replaces with code in its own process.
type Bridges struct {
	authenticator authenticator.Request
	authorizer    authorizer.Authorizer
	// anonymous is true if the test removed the token of the loopback client.
	anonymous bool
	proxy     FrontProxy
}

// Modify calls a test's function on a config with the fields that tests change. No server runs with it. Modify applies
// the changes to s if flags can express them, and returns the bridges for changes of authentication and authorization.
// It skips the test for other changes.
func Modify(t T, s *options.ServerRunOptions, issuer serviceaccount.TokenGenerator, p FrontProxy,
	modify func(*controlplane.Config)) (*Bridges, error) {
	t.Helper()
	config, err := newConfig(s, issuer)
	if err != nil {
		return nil, err
	}
	generic, extra := config.ControlPlane.Generic, &config.ControlPlane.Extra
	authn, authz := generic.Authentication.Authenticator, generic.Authorization.Authorizer
	resolver := generic.RequestInfoResolver
	resources := extra.APIResourceConfigSource
	modify(config)
	switch {
	case generic.AdmissionControl != nil:
		Skip(t, "the test replaces admission")
	case generic.AuditBackend != nil:
		Skip(t, "the test replaces the audit backend")
	case generic.RequestInfoResolver != resolver:
		Skip(t, "the test replaces the resolver of requests")
	case generic.OpenAPIConfig != nil:
		Skip(t, "the test replaces the OpenAPI definitions")
	case config.Extra.RepairServicesInterval != 0:
		Skip(t, "the test changes the interval of the repair of Services")
	}
	s.EndpointReconcilerType = string(config.Extra.EndpointReconcilerType)
	s.Authentication.ServiceAccounts.MaxExpiration = extra.ServiceAccountMaxExpiration
	s.Authentication.ServiceAccounts.ExtendExpiration = extra.ExtendExpiration
	if now := extra.APIResourceConfigSource; now != resources {
		addRuntimeConfig(s.APIEnablement.RuntimeConfig, resources.(*serverstore.ResourceConfig),
			now.(*serverstore.ResourceConfig))
	}
	b := &Bridges{proxy: p, anonymous: generic.LoopbackClientConfig.BearerToken == ""}
	if now := generic.Authentication.Authenticator; now != authn {
		b.authenticator = now
	}
	if now := generic.Authorization.Authorizer; now != authz {
		b.authorizer = now
	}
	return b, nil
}

func newConfig(s *options.ServerRunOptions, issuer serviceaccount.TokenGenerator) (*controlplane.Config, error) {
	generic := genericapiserver.NewConfig(legacyscheme.Codecs)
	generic.LoopbackClientConfig = &rest.Config{BearerToken: token}
	generic.Authentication.Authenticator, generic.Authorization.Authorizer = &original{}, &original{}
	generic.RequestInfoResolver = genericapiserver.NewRequestInfoResolver(generic)
	resources := controlplane.DefaultAPIResourceConfigSource()
	storage := kubeapiserver.NewStorageFactoryConfigEffectiveVersion(compatibility.DefaultBuildEffectiveVersion())
	storage.APIResourceConfig = resources
	factory, err := storage.Complete(s.Etcd).New()
	if err != nil {
		return nil, err
	}
	return &controlplane.Config{
		ControlPlane: controlplaneapiserver.Config{
			Generic: generic,
			Extra: controlplaneapiserver.Extra{
				APIResourceConfigSource:     resources,
				StorageFactory:              factory,
				ServiceAccountIssuer:        issuer,
				ServiceAccountMaxExpiration: s.Authentication.ServiceAccounts.MaxExpiration,
				ExtendExpiration:            s.Authentication.ServiceAccounts.ExtendExpiration,
			},
		},
		Extra: controlplane.Extra{EndpointReconcilerType: reconcilers.Type(s.EndpointReconcilerType)},
	}, nil
}

// addRuntimeConfig adds the versions and resources that differ. Tests also enable versions that no longer exist, which
// changes nothing.
func addRuntimeConfig(pairs map[string]string, before, now *serverstore.ResourceConfig) {
	for gv, on := range now.GroupVersionConfigs {
		if before.GroupVersionConfigs[gv] != on && legacyscheme.Scheme.IsVersionRegistered(gv) {
			pairs[gv.String()] = fmt.Sprint(on)
		}
	}
	for r, on := range now.ResourceConfigs {
		if was, ok := before.ResourceConfigs[r]; !ok || was != on {
			pairs[r.GroupVersion().String()+"/"+r.Resource] = fmt.Sprint(on)
		}
	}
}

// StartModified is Start with the bridges of a test.
func StartModified(ctx context.Context, t T, dir string, s *options.ServerRunOptions, b *Bridges) (*Server, error) {
	t.Helper()
	if b == nil {
		return Start(ctx, t, dir, s)
	}
	if b.authorizer != nil {
		if err := b.serveAuthorizer(ctx, dir, s); err != nil {
			return nil, err
		}
	}
	if b.authenticator == nil {
		return Start(ctx, t, dir, s)
	}
	server, err := b.startBehindProxy(ctx, t, dir, s)
	if err == nil && b.anonymous {
		server.Client.BearerToken = ""
	}
	return server, err
}
