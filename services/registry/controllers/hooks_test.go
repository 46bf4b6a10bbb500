package controllers

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"

	"watershed.dev/services/registry/installer"
)

// A hook is pending until it returns, only on the elected registry. A hook of an earlier term does not count.
func TestStartHooksArePendingUntilTheyReturn(t *testing.T) {
	release := make(chan struct{})
	cs := newControllers(t)
	cs.StartHooks = &StartHooks{}
	cs.Hooks = []installer.PostStartHook{
		{Name: "quick", Run: func(genericapiserver.PostStartHookContext) error { return nil }},
		{Name: "slow", Run: func(genericapiserver.PostStartHookContext) error { <-release; return nil }},
	}
	if pending, elected := cs.StartHooks.Pending(); elected || len(pending) > 0 {
		t.Errorf("before the election: %v, %q", elected, pending)
	}
	first := cs.StartHooks.begin(cs.hookNames())
	first.done(ownHooks...)
	cs.startUpstreamHooks(t.Context(), first, func(err error) { t.Error(err) })
	awaitPending(t, cs.StartHooks, "slow")
	second := cs.StartHooks.begin(cs.hookNames())
	close(release)
	first.done("quick", "slow")
	if pending, _ := cs.StartHooks.Pending(); !slices.Equal(pending, cs.hookNames()) {
		t.Errorf("in the second term: %q", pending)
	}
	second.done(cs.hookNames()...)
	awaitPending(t, cs.StartHooks)
	cs.StartHooks.end()
	if _, elected := cs.StartHooks.Pending(); elected {
		t.Error("it is elected after the end")
	}
}

// awaitPending waits until exactly the named hooks are pending.
func awaitPending(t *testing.T, h *StartHooks, names ...string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		pending, elected := h.Pending()
		if elected && slices.Equal(pending, names) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("elected: %v, pending: %q, not %q", elected, pending, names)
		}
	}
}

// A hook that fails ends the term with its error, and stays pending.
func TestAFailedStartHookEndsTheTerm(t *testing.T) {
	away := errors.New("etcd is away")
	cs := newControllers(t)
	cs.StartHooks = &StartHooks{}
	cs.Hooks = []installer.PostStartHook{
		{Name: "rbac", Run: func(genericapiserver.PostStartHookContext) error { return away }},
	}
	ctx, fail := context.WithCancelCause(t.Context())
	cs.startUpstreamHooks(ctx, cs.StartHooks.begin([]string{"rbac"}), fail)
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, away) {
		t.Error(err)
	}
	if pending, _ := cs.StartHooks.Pending(); !slices.Equal(pending, []string{"rbac"}) {
		t.Errorf("%q", pending)
	}
}
