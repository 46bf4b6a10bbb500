package handlers

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// An owner has so many slots. Another owner, and the empty owner, do not wait for them.
func TestOwnerSlots(t *testing.T) {
	s := &ownerSlots{perOwner: 2, maxWaiting: 1}
	ended, end := context.WithCancel(t.Context())
	end()
	acquire := func(ctx context.Context, owner string) func() {
		release, err := s.acquire(ctx, owner)
		if err != nil {
			t.Fatalf("%q: %v", owner, err)
		}
		return release
	}
	first, second := acquire(t.Context(), "a"), acquire(t.Context(), "a")
	if _, err := s.acquire(ended, "a"); err == nil {
		t.Error("a third slot of an owner is free")
	}
	s.owners["a"].holders++ // waits
	if _, err := s.acquire(t.Context(), "a"); !errors.Is(err, errBusy) {
		t.Errorf("beside an operation that waits: %v", err)
	}
	s.owners["a"].holders--
	for _, owner := range []string{"b", ""} {
		acquire(t.Context(), owner)()
	}
	first()
	acquire(t.Context(), "a")()
	second()
	if len(s.owners) != 0 {
		t.Errorf("%d owners are left", len(s.owners))
	}
}

// countedDeletions counts the deletions of collections. Each lasts until its context ends.
type countedDeletions struct {
	rest.Storage
	running *atomic.Int32
}

// DeleteCollection implements rest.CollectionDeleter.
func (d countedDeletions) DeleteCollection(ctx context.Context, _ rest.ValidateObjectFunc, _ *metav1.DeleteOptions,
	_ *internalversion.ListOptions) (runtime.Object, error) {
	d.running.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// A user deletes two collections at a time. Further requests wait until their deadline, or get 429 if too many wait.
func TestAUserDeletesTwoCollectionsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var running atomic.Int32
		scope := &RequestScope{Storage: countedDeletions{running: &running}, APIResource: &registryv1.APIResource{}}
		var requests sync.WaitGroup
		remove := func() error {
			_, err := scope.Write(ctx, &registryv1.WriteRequest{
				Verb: "deletecollection",
				User: &commonv1.User{Name: "a"},
			}, nil)
			return err
		}
		for range maxOwnDeletions + maxWaitingDeletions {
			requests.Go(func() { _ = remove() })
		}
		synctest.Wait()
		if err := remove(); !apierrors.IsTooManyRequests(err) {
			t.Errorf("beside many that wait: %v", err)
		}
		if n := running.Load(); n != maxOwnDeletions {
			t.Errorf("%d collections are being deleted", n)
		}
		cancel()
		requests.Wait()
	})
}
