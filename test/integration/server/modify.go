package server

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	serverstore "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
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

// Modify calls a test's function on a config that no server runs. It applies the changes to s if flags can express
// them, and returns the bridges for changes of authentication and authorization. It skips the test for other changes.
func Modify(t T, s *options.ServerRunOptions, config *controlplane.Config, p FrontProxy,
	modify func(*controlplane.Config)) *Bridges {
	t.Helper()
	generic, extra := config.ControlPlane.Generic, &config.ControlPlane.Extra
	generic.Authentication.Authenticator, generic.Authorization.Authorizer = &original{}, &original{}
	authn, authz := generic.Authentication.Authenticator, generic.Authorization.Authorizer
	admission, audit := generic.AdmissionControl, generic.AuditBackend
	resolver, openapi := generic.RequestInfoResolver, generic.OpenAPIConfig
	resources := extra.APIResourceConfigSource
	modify(config)
	switch {
	case generic.AdmissionControl != admission:
		Skip(t, "the test replaces admission")
	case generic.AuditBackend != audit:
		Skip(t, "the test replaces the audit backend")
	case generic.RequestInfoResolver != resolver:
		Skip(t, "the test replaces the resolver of requests")
	case generic.OpenAPIConfig != openapi:
		Skip(t, "the test replaces the OpenAPI definitions")
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
	return b
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
