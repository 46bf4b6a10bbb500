package watch_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/events"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// cachedRoles reads roles from a cache, as a replica of the watch tier does.
type cachedRoles struct {
	roleObjects
	cached watch.Cached
}

func (o cachedRoles) Select(ctx context.Context, q *query.Query, start events.Start) ([]*cache.Item, int64, error) {
	return o.cached.Select(ctx, q, start)
}

func (o cachedRoles) Current(ctx context.Context) (int64, error) { return o.cached.Current(ctx) }

// replicaOfRoles is a replica that has read the log up to revision 10. etcd is at revision, and has the role z.
type replicaOfRoles struct {
	cache *cache.Cache
	*watch.Server
}

func newReplicaOfRoles(revision int64) *replicaOfRoles {
	c := cache.New(1<<20, 0)
	c.Apply(reset(10, 0, ""))
	var etcd atomic.Int64
	etcd.Store(revision)
	source := logreader.Source{
		Revision: func(context.Context) (int64, error) { return etcd.Load(), nil },
		Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
			add(&registryv1.Row{Namespace: "x", Name: "z", Revision: 8, Json: roleJSON("z", 8)})
			return 10, nil
		},
	}
	reader := logreader.New(c, nil, source, &lifecycle.Readiness{}, logreader.Config{StaleAfter: 4 * time.Second})
	return &replicaOfRoles{c, watch.New(watch.Options{
		Objects:        cachedRoles{roleObjects{&etcd}, watch.Cached{Cache: c, LogReader: reader}},
		Cache:          c,
		LogReader:      reader,
		Converter:      conversion.New(nil, c, 0),
		ProgressPeriod: 10 * time.Second,
	})}
}

// watch opens a watch of roles. received returns the events of the watch.
func (r *replicaOfRoles) watch(t *testing.T, request *watchfanoutv1.WatchRequest) (received func() string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	t.Cleanup(func() { cancel(); <-ended })
	client := &recorder{ctx: ctx}
	request.Query, request.AllowBookmarks = roleQuery(""), true
	go func() { defer close(ended); _ = r.Watch(request, client) }()
	return func() string {
		synctest.Wait()
		return client.received(t)
	}
}

func withInitialEvents() *watchfanoutv1.WatchRequest {
	yes := true
	return &watchfanoutv1.WatchRequest{SendInitialEvents: &yes}
}

// A watch with initial events does not repeat the events before them (kubernetes #73845).
func TestInitialEventsAreNotRepeated(t *testing.T) {
	w, s := newServer(t)
	for i := range int64(8) {
		w.Apply(logv1.Type_TYPE_MODIFIED, 11+i, "a", "node-0", "")
	}
	request := withInitialEvents()
	request.Query, request.AllowBookmarks = fixture.Query(), true
	o := start(t, s, request)
	if got := o.receive(4); got != "ADDED a, ADDED b, ADDED c, BOOKMARK 18" {
		t.Error(got)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 19, "d", "node-0", "")
	if got := o.receive(1); got != "ADDED d" {
		t.Errorf("after the initial events comes %s", got)
	}
}

// The initial events are as new as etcd when the watch began, or as new as the watch's resourceVersion
// (kubernetes #122830).
func TestInitialEventsAreAsNewAsEtcd(t *testing.T) {
	for _, revision := range []string{"", "12"} {
		synctest.Test(t, func(t *testing.T) {
			r := newReplicaOfRoles(12)
			request := withInitialEvents()
			request.ResourceVersion = revision
			received := r.watch(t, request)
			r.cache.Apply(role(11, 0, logv1.Type_TYPE_ADDED, "a", nil))
			if got := received(); got != "" {
				t.Errorf("the replica is behind etcd, and sends %s", got)
			}
			r.cache.Apply(role(12, 0, logv1.Type_TYPE_ADDED, "b", nil))
			if got := received(); got != "ADDED a, ADDED b, ADDED z, BOOKMARK 12" {
				t.Error(got)
			}
		})
	}
}

// The bookmark after the initial events is sent at once, and the next within a minute (kubernetes #122277, #126958).
// etcd is idle.
func TestTheInitialEventsEndAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		received := newReplicaOfRoles(10).watch(t, withInitialEvents())
		if got := received(); got != "ADDED z, BOOKMARK 10" {
			t.Error(got)
		}
		time.Sleep(11 * time.Second)
		if got := received(); got != "ADDED z, BOOKMARK 10, BOOKMARK 10" {
			t.Error(got)
		}
	})
}

// A watch from a revision that etcd has reached, and the replica has not, does not receive the events up to it, and no
// bookmark before it (etcd #20221). A watch from N does not receive the event of N (kubernetes #24004).
func TestAWatchFromALaterRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReplicaOfRoles(12)
		received := r.watch(t, &watchfanoutv1.WatchRequest{ResourceVersion: "12"})
		for i := range int64(2) {
			r.cache.Apply(role(11+i, 0, logv1.Type_TYPE_ADDED, fmt.Sprint("before-", i), nil))
			if i == 0 {
				time.Sleep(11 * time.Second)
			}
			if got := received(); got != "" && got != "BOOKMARK 12" {
				t.Errorf("at revision %d, it receives %s", 11+i, got)
			}
		}
		r.cache.Apply(role(13, 0, logv1.Type_TYPE_ADDED, "after", nil))
		if got := received(); got != "BOOKMARK 12, ADDED after" {
			t.Error(got)
		}
	})
}
