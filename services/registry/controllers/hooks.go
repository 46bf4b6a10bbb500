package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	genericapiserver "k8s.io/apiserver/pkg/server"
)

// StartHooks is the progress of kube-apiserver's start hooks (k8s.io/apiserver/pkg/server, AddPostStartHook) that the
// elected registry runs. Its zero value is the state of a registry that is not elected. Its methods are safe for
// concurrent use.
//
//	not elected --begin--> elected, all pending --done for each--> elected, none pending --end--> not elected
type StartHooks struct{ term atomic.Pointer[hooksTerm] }

// hooksTerm is the progress of a call of Controllers.Run. A hook of an earlier term may still return.
type hooksTerm struct {
	mu      sync.Mutex
	pending []string
}

// Pending returns the hooks that have not completed. elected reports whether this registry runs the hooks.
func (h *StartHooks) Pending() (pending []string, elected bool) {
	t := h.term.Load()
	if t == nil {
		return nil, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.pending), true
}

func (h *StartHooks) begin(names []string) *hooksTerm {
	t := &hooksTerm{pending: names}
	h.term.Store(t)
	return t
}

func (h *StartHooks) end() { h.term.Store(nil) }

func (t *hooksTerm) done(names ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pending = slices.DeleteFunc(t.pending, func(name string) bool { return slices.Contains(names, name) })
}

// The names of kube-apiserver's start hooks that run code of this package. The other hooks are upstream's
// (Controllers.Hooks).
const (
	hookServiceCIDR        = "start-kubernetes-service-cidr-controller"
	hookSystemNamespaces   = "start-system-namespaces-controller"
	hookAuthenticationInfo = "start-cluster-authentication-info-controller"
	hookAutoregistration   = "kube-apiserver-autoregistration"
	hookAutoregistered     = "autoregister-completion"
	hookLocalAvailability  = "apiservice-status-local-available-controller"
	hookRemoteAvailability = "apiservice-status-remote-available-controller"
	hookCRDs               = "start-apiextensions-controllers"
	hookLegacyTokens       = "start-legacy-token-tracking-controller"
	hookIdentityLease      = "start-kube-apiserver-identity-lease-controller"
	hookIdentityLeaseGC    = "start-kube-apiserver-identity-lease-garbage-collector"
	hookKubernetesService  = "bootstrap-controller"
)

var ownHooks = []string{hookServiceCIDR, hookSystemNamespaces, hookAuthenticationInfo, hookAutoregistration,
	hookAutoregistered, hookLocalAvailability, hookRemoteAvailability, hookCRDs, hookLegacyTokens, hookIdentityLease,
	hookIdentityLeaseGC, hookKubernetesService}

// hookNames returns the names of all hooks that Run completes.
func (cs *Controllers) hookNames() []string {
	names := slices.Clone(ownHooks)
	for _, h := range cs.Hooks {
		names = append(names, h.Name)
	}
	return names
}

// startUpstreamHooks starts upstream's hooks. It calls fail with the error of a hook: kube-apiserver exits then, and
// here another registry is elected.
func (cs *Controllers) startUpstreamHooks(ctx context.Context, hooks *hooksTerm, fail context.CancelCauseFunc) {
	for _, h := range cs.Hooks {
		go func() {
			if err := h.Run(genericapiserver.PostStartHookContext{
				LoopbackClientConfig: cs.Loopback,
				Context:              ctx,
			}); err != nil {
				fail(fmt.Errorf("start hook %s: %w", h.Name, err))
				return
			}
			hooks.done(h.Name)
		}()
	}
}
