package storage

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	apistorage "k8s.io/apiserver/pkg/storage"

	"watershed.dev/platform/turns"
)

// queueTest begins updates in a bubble of synctest, and records when they begin.
type queueTest struct {
	*testing.T
	*updateQueue
	since time.Time

	mu    sync.Mutex
	begun map[string]time.Duration
	order []string
}

// start begins an update on another goroutine, which computes and runs for the times. It returns when the update waits
// or runs.
func (q *queueTest) start(ctx context.Context, name, owner, key string, computes, runs time.Duration) {
	go func() {
		u, err := q.begin(request.WithUser(ctx, &user.DefaultInfo{Name: owner}), key)
		if err != nil {
			return
		}
		defer u.end()
		q.mu.Lock()
		q.begun[name] = time.Since(q.since)
		q.order = append(q.order, name)
		q.mu.Unlock()
		time.Sleep(computes)
		u.processor.Yield()
		time.Sleep(runs)
	}()
	synctest.Wait()
}

func testQueue(t *testing.T, limit int, do func(*queueTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		q := &queueTest{T: t, updateQueue: updateQueueOf(limit), since: time.Now(), begun: map[string]time.Duration{}}
		do(q)
		synctest.Wait()
		if len(q.objects) > 0 {
			t.Errorf("%d objects remain", len(q.objects))
		}
	})
}

// The updates of an object run in the order of their arrival. An update of another object, or by another owner, does
// not wait for them.
func TestUpdatesOfAnObjectRunInOrder(t *testing.T) {
	testQueue(t, 4, func(q *queueTest) {
		const each = longestUpdate / 2
		names := []string{"first", "second", "third", "fourth"}
		for _, name := range names {
			q.start(q.Context(), name, "jane", "a", 0, each)
		}
		q.start(q.Context(), "another object", "jane", "b", 0, 0)
		q.start(q.Context(), "another owner", "joe", "a", 0, 0)
		time.Sleep(10 * each)
		if want := []string{"first", "another object", "another owner", "second", "third", "fourth"}; !slices.Equal(
			q.order, want) {
			t.Errorf("the order is %v, want %v", q.order, want)
		}
		for i, name := range names {
			if want := time.Duration(i) * each; q.begun[name] != want {
				t.Errorf("the %s begins after %v, want %v", name, q.begun[name], want)
			}
		}
	})
}

// An update waits until the update before it has run for longestUpdate, from its beginning. An update whose context
// ends leaves the order as it is.
func TestALongUpdateDelaysTheNextForABoundedTime(t *testing.T) {
	testQueue(t, 4, func(q *queueTest) {
		ctx, cancel := context.WithTimeout(q.Context(), longestUpdate/2)
		defer cancel()
		q.start(q.Context(), "first", "jane", "a", 0, 10*longestUpdate)
		q.start(ctx, "canceled", "jane", "a", 0, 0)
		time.Sleep(longestUpdate * 3 / 4)
		q.start(q.Context(), "second", "jane", "a", 0, 10*longestUpdate)
		q.start(q.Context(), "third", "jane", "a", 0, 10*longestUpdate)
		time.Sleep(20 * longestUpdate)
		for name, want := range map[string]time.Duration{"first": 0, "second": longestUpdate, "third": 2 * longestUpdate} {
			if got, ok := q.begun[name]; !ok || got != want {
				t.Errorf("the %s begins after %v, want %v", name, got, want)
			}
		}
		if _, ok := q.begun["canceled"]; ok {
			t.Error("the canceled update runs")
		}
	})
}

// Owners get the turns on the processors in rotation. A turn ends with the computation, or after turns.Slice.
func TestUpdatesTakeTurnsOnTheProcessors(t *testing.T) {
	testQueue(t, 1, func(q *queueTest) {
		const short = turns.Slice / 2
		q.start(q.Context(), "long", "jane", "a", time.Hour, 0)
		q.start(q.Context(), "jane 1", "jane", "b", short, time.Hour)
		q.start(q.Context(), "jane 2", "jane", "c", short, time.Hour)
		q.start(q.Context(), "joe", "joe", "d", short, time.Hour)
		time.Sleep(3 * time.Hour)
		for name, want := range map[string]time.Duration{
			"jane 1": turns.Slice, "joe": turns.Slice + short, "jane 2": turns.Slice + 2*short,
		} {
			if q.begun[name] != want {
				t.Errorf("%s begins after %v, want %v", name, q.begun[name], want)
			}
		}
	})
}

// computingStore computes the new object, and then calls stored.
type computingStore struct {
	apistorage.Interface
	stored func()
}

func (s *computingStore) GuaranteedUpdate(_ context.Context, _ string, _ runtime.Object, _ bool,
	_ *apistorage.Preconditions, try apistorage.UpdateFunc, _ runtime.Object) error {
	_, _, err := try(nil, apistorage.ResponseMeta{})
	s.stored()
	return err
}

// A store's update has no turn on the processors while it waits for etcd.
func TestAnUpdateThatWaitsForEtcdHasNoTurn(t *testing.T) {
	testQueue(t, 1, func(q *queueTest) {
		store := &cachedStore{writeCache: newWriteCache(), updateQueue: q.updateQueue}
		store.Interface = &computingStore{stored: func() { q.start(q.Context(), "another", "joe", "b", 0, 0) }}
		compute := func(runtime.Object, apistorage.ResponseMeta) (runtime.Object, *uint64, error) {
			return nil, nil, nil
		}
		err := store.GuaranteedUpdate(q.Context(), "a", nil, false, nil, compute, nil)
		if at, ok := q.begun["another"]; err != nil || !ok || at > 0 {
			t.Errorf("another update begins after %v, %v; %v", at, ok, err)
		}
	})
}
