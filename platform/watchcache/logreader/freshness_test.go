package logreader

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/cache"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

func newReader(s Source) *Reader {
	differences := prometheus.NewCounterVec(prometheus.CounterOpts{}, []string{"resource"})
	config := Config{StaleAfter: 3 * time.Second, Backfills: true, Differences: differences}
	return New(cache.New(1<<20, 0), nil, s, &lifecycle.Readiness{}, config)
}

// A read of a revision that never arrives fails after 3 s. Reads in the next 10 s fail after 100 ms.
func TestAReadWaits3SecondsForTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newReader(Source{Revision: func(context.Context) (int64, error) { return 9, nil }})
		for _, want := range []time.Duration{3 * time.Second, 100 * time.Millisecond} {
			began := time.Now()
			err := l.WaitUntilConsistent(t.Context())
			if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != want {
				t.Errorf("%v after %v, want %v", err, took, want)
			}
		}
		began := time.Now()
		if err := l.WaitUntilFresh(t.Context(), 9); err == nil || time.Since(began) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// If etcd's revision is below the log's, etcd was restored from a backup. A read then waits for the log's next epoch,
// and the replica is not ready.
func TestAReadOfARestoredEtcdWaitsForTheEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newReader(Source{Revision: func(context.Context) (int64, error) { return 15, nil }})
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 20, Epoch: "h"})
		l.compare(t.Context())
		if l.ready.Err() == nil {
			t.Error("the replica is ready")
		}
		if err := l.WaitUntilCurrent(t.Context()); status.Code(err) != codes.Unavailable {
			t.Errorf("the read ends with %v", err)
		}
		time.AfterFunc(time.Second, func() {
			l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 15, Epoch: "restored"})
		})
		l.compare(t.Context())
		if err := l.WaitUntilCurrent(t.Context()); err != nil || l.ready.Err() != nil {
			t.Errorf("in the next epoch: %v, %v", err, l.ready.Err())
		}
	})
}

// The reader compares its cache with etcd every second, and requests progress if the cache is behind. If progress does
// not arrive within StaleAfter, the cache is stale. A cache that is behind and advances is not stale.
func TestTheCacheIsComparedWithEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // guards the variables
		revision, requests, responding, reachable := int64(9), 0, true, true
		set := func(r int64, responds bool) {
			mu.Lock()
			defer mu.Unlock()
			revision, responding = r, responds
		}
		l := newReader(Source{Revision: func(context.Context) (int64, error) {
			mu.Lock()
			defer mu.Unlock()
			if !reachable {
				return 0, errors.New("etcd does not respond")
			}
			return revision, nil
		}})
		progress := func(r int64) { l.cache.Apply(&logv1.Event{Revision: r, Epoch: "h"}) }
		l.requestProgress = func() error {
			mu.Lock()
			defer mu.Unlock()
			if requests++; responding {
				progress(revision)
			}
			return nil
		}
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 9, Epoch: "h"})
		if l.Fresh() || l.ready.Err() == nil {
			t.Error("the cache is fresh before the first comparison")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.verify(ctx) }()
		wait := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		check := func(state string, fresh, stale bool) {
			t.Helper()
			ready, err := l.ready.Err() == nil, l.CheckFresh()
			if l.Fresh() != fresh || ready == stale || (status.Code(err) == codes.Unavailable) != stale {
				t.Errorf("%s: fresh %v, ready %v, %v", state, l.Fresh(), ready, err)
			}
		}
		wait(10 * verifyPeriod)
		if check("reached", true, false); requests != 0 {
			t.Errorf("%d progress requests of a cache that is not behind", requests)
		}
		set(12, true)
		wait(10 * verifyPeriod)
		if check("reached on request", true, false); requests != 1 {
			t.Errorf("%d progress requests", requests)
		}
		set(15, false)
		wait(3 * time.Second)
		check("behind for less than 3 s", true, false)
		wait(2 * time.Second)
		check("behind for more than 4 s", false, true)
		progress(14)
		wait(4 * time.Second)
		check("late and advancing", false, false)
		set(15, true)
		wait(2 * verifyPeriod)
		check("reached again", true, false)
		for r := int64(20); r < 60; r++ { // always behind, and advancing
			set(r+5, false)
			wait(verifyPeriod)
			if progress(r); l.CheckFresh() != nil {
				t.Fatal("a cache that is behind and advances is stale")
			}
		}
		mu.Lock()
		reachable = false // the last result holds
		mu.Unlock()
		wait(10 * verifyPeriod)
		check("without etcd", false, false)
		cancel()
		<-done
	})
}
