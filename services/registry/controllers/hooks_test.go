package controllers

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"

	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/internal/fixture"
)

// hooksOn returns the start hooks of a registry on an etcd.
func hooksOn(fx *fixture.Fixture, identity string) *StartHooks {
	return &StartHooks{Storage: fx.Resources.Storage, Identity: identity}
}

func elect(t *testing.T, fx *fixture.Fixture, identity string) {
	t.Helper()
	s := fx.Resources.Storage
	if _, err := s.Client.Client.Put(t.Context(), s.OwnKey(ElectionKey), identity); err != nil {
		t.Fatal(err)
	}
}

// awaitPending waits until a registry reports exactly the named hooks as pending.
func awaitPending(t *testing.T, h *StartHooks, names ...string) {
	t.Helper()
	awaitProgress(t, h, true, names)
}

// awaitProgress polls the progress of a registry, because StartHooks does not announce its changes.
func awaitProgress(t *testing.T, h *StartHooks, wantKnown bool, names []string) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		pending, known, err := h.Pending(t.Context())
		if err == nil && known == wantKnown && slices.Equal(pending, names) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("known: %v, pending: %q, %v, not %v, %q", known, pending, err, wantKnown, names)
		}
	}
}

func isKnown(t *testing.T, h *StartHooks) bool {
	t.Helper()
	_, known, err := h.Pending(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return known
}

// Every registry reports the progress of the elected registry. A hook is pending until it returns.
func TestStartHooksArePendingUntilTheyReturn(t *testing.T) {
	fx := fixture.New(t)
	release := make(chan struct{})
	cs := newControllers(t)
	cs.StartHooks = hooksOn(fx, "a")
	other := hooksOn(fx, "b")
	cs.Hooks = []installer.PostStartHook{
		{Name: "quick", Run: func(genericapiserver.PostStartHookContext) error { return nil }},
		{Name: "slow", Run: func(genericapiserver.PostStartHookContext) error { <-release; return nil }},
	}
	if isKnown(t, other) {
		t.Error("the progress is known before the election")
	}
	elect(t, fx, "a")
	if isKnown(t, other) {
		t.Error("the progress is known before the elected registry published it")
	}
	term := cs.StartHooks.begin(t.Context(), cs.hookNames())
	term.done(ownHooks()...)
	cs.startHooks(t.Context(), cs.Hooks, term, func(err error) { t.Error(err) })
	awaitPending(t, other, "slow")
	close(release)
	awaitPending(t, other)
}

// Without an elected registry, a registry that runs the hooks reports its own progress.
func TestARegistryWithoutLeaseReportsItsStartHooks(t *testing.T) {
	h := hooksOn(fixture.New(t), "a")
	ctx, end := context.WithCancel(t.Context())
	term := h.begin(ctx, []string{"x", "y"})
	awaitPending(t, h, "x", "y")
	term.done("x", "y")
	awaitPending(t, h)
	end() // the progress of an ended term does not count
	awaitProgress(t, h, false, nil)
}

// A hook of an earlier term does not count, and a registry that lost the election publishes nothing.
func TestStartHooksAreOfTheElectedRegistry(t *testing.T) {
	fx := fixture.New(t)
	first, second := hooksOn(fx, "a"), hooksOn(fx, "b")
	elect(t, fx, "a")
	before := first.begin(t.Context(), []string{"x"})
	awaitPending(t, second, "x")
	elect(t, fx, "b")
	if isKnown(t, first) {
		t.Error("the progress of an earlier term counts")
	}
	second.begin(t.Context(), []string{"x", "y"})
	awaitPending(t, first, "x", "y")
	before.done("x")
	if err := first.put(t.Context(), progress{"a", nil}); err != nil {
		t.Error(err)
	}
	awaitPending(t, first, "x", "y")
}

// A hook that fails ends the term with its error, and stays pending.
func TestAFailedStartHookEndsTheTerm(t *testing.T) {
	away := errors.New("etcd is away")
	cs := newControllers(t)
	cs.Hooks = []installer.PostStartHook{
		{Name: "rbac", Run: func(genericapiserver.PostStartHookContext) error { return away }},
	}
	term := &hooksTerm{}
	term.pending.Set([]string{"rbac"})
	ctx, fail := context.WithCancelCause(t.Context())
	cs.startHooks(ctx, cs.Hooks, term, fail)
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, away) {
		t.Error(err)
	}
	if pending, _ := term.pending.Get(); !slices.Equal(pending, []string{"rbac"}) {
		t.Errorf("%q", pending)
	}
}

// A wait for a hook ends once the hook is completed, or after its timeout. A hook that the term does not have is not
// waited for.
func TestAWaitForAStartHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		term := &hooksTerm{}
		term.pending.Set([]string{"rbac", "repair"})
		waits := func(name string) time.Duration {
			began := time.Now()
			term.wait(t.Context(), name, time.Minute)
			return time.Since(began)
		}
		if took := waits("other"); took != 0 {
			t.Errorf("the wait for another hook took %v", took)
		}
		if took := waits("rbac"); took != time.Minute {
			t.Errorf("the wait for a pending hook took %v", took)
		}
		time.AfterFunc(time.Second, func() { term.done("rbac") })
		time.AfterFunc(2*time.Second, func() { term.done("repair") })
		if took := waits("repair"); took != 2*time.Second {
			t.Errorf("the wait for a hook took %v", took)
		}
	})
}
