package controllers

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubernetes/pkg/controlplane/controller/clusterauthenticationtrust"
)

// trust is the content of kube-system/extension-apiserver-authentication. The authorities live as long as the process.
// If a file becomes invalid, each term publishes its last valid content.
type trust struct {
	info        clusterauthenticationtrust.ClusterAuthenticationInfo
	authorities []*dynamiccertificates.DynamicFileCAContent
	// controller is the controller of the current or the last term.
	controller atomic.Pointer[clusterauthenticationtrust.Controller]
}

// readTrust reads the certificate authorities' files.
func (o *Options) readTrust() (*trust, error) {
	t := &trust{}
	for _, f := range []struct {
		flag, purpose, path string
		into                *dynamiccertificates.CAContentProvider
	}{{"client-ca-file", "client-ca-bundle", o.ClientCAFile, &t.info.ClientCA},
		{"requestheader-client-ca-file", "request-header", o.RequestHeaderCAFile, &t.info.RequestHeaderCA}} {
		if f.path == "" {
			continue
		}
		ca, err := dynamiccertificates.NewDynamicCAContentFromFile(f.purpose, f.path)
		if err != nil {
			return nil, fmt.Errorf("--%s %q: %w", f.flag, f.path, err)
		}
		ca.AddListener(t)
		*f.into, t.authorities = ca, append(t.authorities, ca)
	}
	if t.info.RequestHeaderCA != nil {
		t.info.RequestHeaderAllowedNames = headerrequest.StaticStringSlice(o.RequestHeaderNames)
		t.info.RequestHeaderUsernameHeaders = headerrequest.StaticStringSlice(o.RequestHeaderUserHeaders)
		t.info.RequestHeaderUIDHeaders = headerrequest.StaticStringSlice(o.RequestHeaderUIDHeaders)
		t.info.RequestHeaderGroupHeaders = headerrequest.StaticStringSlice(o.RequestHeaderGroups)
		t.info.RequestHeaderExtraHeaderPrefixes = headerrequest.StaticStringSlice(o.RequestHeaderExtras)
	}
	return t, nil
}

// publish starts the controller of kube-system/extension-apiserver-authentication.
func (t *trust) publish(ctx context.Context, client kubernetes.Interface) {
	c := clusterauthenticationtrust.NewClusterAuthenticationTrustController(t.info, client)
	t.controller.Store(c)
	go c.Run(ctx, 1)
}

// Enqueue implements dynamiccertificates.Listener. AddListener must not be called on authorities that run, so the
// listener of all terms is the trust.
func (t *trust) Enqueue() {
	if c := t.controller.Load(); c != nil {
		c.Enqueue()
	}
}

// ReloadAuthorities reads the certificate authorities' files after each change, until ctx ends. Every registry calls
// it, once.
func (cs *Controllers) ReloadAuthorities(ctx context.Context) error {
	var all sync.WaitGroup
	for _, ca := range cs.trust.authorities {
		all.Go(func() { ca.Run(ctx, 1) })
	}
	all.Wait()
	<-ctx.Done()
	return ctx.Err()
}
