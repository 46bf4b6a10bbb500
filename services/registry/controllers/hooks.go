package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchable"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// StartHooks is the progress of kube-apiserver's start hooks (k8s.io/apiserver/pkg/server, AddPostStartHook). The
// elected registry runs the hooks and publishes its progress in etcd, so that every registry can report it. Its methods
// are safe for concurrent use.
//
//	begin ──▶ all hooks pending ──done for each──▶ no hook pending
type StartHooks struct {
	Storage *storage.Storage
	// Identity is the name of this registry in the election.
	Identity string

	// ownTerm is the term of this registry, or nil.
	ownTerm atomic.Pointer[hooksTerm]
}

const (
	// progressKey is the name of the own key with the progress of the elected registry.
	progressKey = "start-hooks"
	// publishTimeout bounds a write of the progress. publishPause is the pause after a failed write, and fullPause the
	// pause if etcd is full.
	publishTimeout = 3 * time.Second
	publishPause   = 100 * time.Millisecond
	fullPause      = 10 * time.Second
)

// progress is the value of progressKey. The JSON names must not change, because replicas of two releases share the key.
type progress struct {
	Identity string   `json:"identity"`
	Pending  []string `json:"pending"`
}

// Pending returns the hooks that the elected registry has not completed. If no registry is elected, it returns the
// hooks that this registry runs and has not completed. known is false if neither runs them, or if the elected registry
// has not published its progress yet.
func (h *StartHooks) Pending(ctx context.Context) (pending []string, known bool, err error) {
	resp, err := h.Storage.Client.Txn(ctx).Then(clientv3.OpGet(h.Storage.OwnKey(ElectionKey)),
		clientv3.OpGet(h.Storage.OwnKey(progressKey))).Commit()
	if err != nil {
		return nil, false, err
	}
	elected, published := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	if len(elected) == 0 {
		if t := h.ownTerm.Load(); t != nil {
			pending, _ = t.pending.Get()
			return pending, true, nil
		}
		return nil, false, nil
	}
	leader, p := string(elected[0].Value), progress{}
	if len(published) > 0 {
		if err := json.Unmarshal(published[0].Value, &p); err != nil {
			return nil, false, fmt.Errorf("the progress of the start hooks: %w", err)
		}
	}
	if p.Identity == leader {
		return p.Pending, true, nil
	}
	return nil, false, nil
}

// hooksTerm is the progress of a call of Controllers.Run. A hook of an earlier term may still return.
type hooksTerm struct {
	pending watchable.Value[[]string]
}

// begin starts a term, and publishes its progress until ctx ends.
func (h *StartHooks) begin(ctx context.Context, names []string) *hooksTerm {
	t := &hooksTerm{}
	t.pending.Set(names)
	h.ownTerm.Store(t)
	go h.publish(ctx, t)
	return t
}

func (h *StartHooks) publish(ctx context.Context, t *hooksTerm) {
	defer h.ownTerm.CompareAndSwap(t, nil)
	for ctx.Err() == nil {
		pending, changed := t.pending.Get()
		var retry <-chan time.Time
		if err := h.put(ctx, progress{h.Identity, pending}); err != nil && ctx.Err() == nil {
			level, pause := slog.LevelWarn, publishPause
			if errors.Is(err, rpctypes.ErrNoSpace) { // the election warns
				level, pause, changed = slog.LevelDebug, fullPause, nil
			}
			slog.Log(ctx, level, "Cannot publish the progress of the start hooks", "error", err)
			retry = time.After(pause)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-retry:
		}
	}
}

// put writes the progress, unless another registry is elected.
func (h *StartHooks) put(ctx context.Context, p progress) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	value, err := json.Marshal(p)
	if err != nil {
		return err
	}
	elected := clientv3.Compare(clientv3.Value(h.Storage.OwnKey(ElectionKey)), "=", h.Identity)
	_, err = h.Storage.Client.Txn(ctx).If(elected).
		Then(clientv3.OpPut(h.Storage.OwnKey(progressKey), string(value))).Commit()
	return err
}

// done marks hooks as completed.
func (t *hooksTerm) done(names ...string) {
	t.pending.Update(func(pending []string) ([]string, bool) {
		rest := slices.DeleteFunc(slices.Clone(pending), func(name string) bool { return slices.Contains(names, name) })
		return rest, len(rest) < len(pending)
	})
}

// wait waits until a hook is completed, for at most a timeout.
func (t *hooksTerm) wait(ctx context.Context, name string, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		pending, changed := t.pending.Get()
		if !slices.Contains(pending, name) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// repairTimeout is how long the kubernetes Service waits for hookServiceRepair. It is created even if the repair fails.
const repairTimeout = 10 * time.Second

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
	// hookServiceRepair fails after a minute if the first repair fails (Controllers.repairServices). The first repair
	// may fail if a Service is created during it, because the repair's informers may have received the Service but not
	// its IPAddress.
	hookServiceRepair = installer.ServiceRepairHook

	hookCoordinatedElection = "start-kube-apiserver-coordinated-leader-election-controller"
)

// ownHooks returns the names of the hooks of this package.
func ownHooks() []string {
	names := []string{hookServiceCIDR, hookSystemNamespaces, hookAuthenticationInfo, hookAutoregistration,
		hookAutoregistered, hookLocalAvailability, hookRemoteAvailability, hookCRDs, hookLegacyTokens,
		hookKubernetesService, hookServiceRepair}
	if HasIdentityLease() {
		names = append(names, hookIdentityLease, hookIdentityLeaseGC)
	}
	if hasCoordinatedElection() {
		names = append(names, hookCoordinatedElection)
	}
	return names
}

// hookNames returns the names of all hooks that Run completes.
func (cs *Controllers) hookNames() []string {
	names := ownHooks()
	for _, h := range cs.Hooks {
		names = append(names, h.Name)
	}
	return names
}

// startHooks starts hooks with the signature of upstream's. It calls fail with the error of a hook: kube-apiserver
// exits then, and here another registry is elected.
func (cs *Controllers) startHooks(ctx context.Context, all []installer.PostStartHook, hooks *hooksTerm,
	fail context.CancelCauseFunc) {
	for _, h := range all {
		go func() {
			hookContext := genericapiserver.PostStartHookContext{LoopbackClientConfig: cs.Loopback, Context: ctx}
			if err := runHook(h, hookContext); err != nil {
				fail(fmt.Errorf("start hook %s: %w", h.Name, err))
				return
			}
			hooks.done(h.Name)
		}()
	}
}

// runHook runs a hook. A panic, which an object in etcd may cause, ends only the term.
func runHook(h installer.PostStartHook, c genericapiserver.PostStartHookContext) (err error) {
	defer recovery.ToError("start hook "+h.Name, &err)
	return h.Run(c)
}
