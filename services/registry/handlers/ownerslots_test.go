package handlers

import (
	"context"
	"testing"
)

// An owner has so many slots. Another owner, and the empty owner, do not wait for them.
func TestOwnerSlots(t *testing.T) {
	s := &ownerSlots{}
	ended, end := context.WithCancel(t.Context())
	end()
	acquire := func(ctx context.Context, owner string) func() {
		release, err := s.acquire(ctx, owner, 2)
		if err != nil {
			t.Fatalf("%q: %v", owner, err)
		}
		return release
	}
	first, second := acquire(t.Context(), "a"), acquire(t.Context(), "a")
	if _, err := s.acquire(ended, "a", 2); err == nil {
		t.Error("a third slot of an owner is free")
	}
	for _, owner := range []string{"b", ""} {
		acquire(t.Context(), owner)()
	}
	waits := make(chan func())
	go func() { waits <- acquire(t.Context(), "a") }()
	first()
	(<-waits)()
	second()
	if len(s.owners) != 0 {
		t.Errorf("%d owners are left", len(s.owners))
	}
}
