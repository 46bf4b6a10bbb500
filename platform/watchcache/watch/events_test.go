package watch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// roleObjects is an etcd with the role z.
type roleObjects struct{ revision *atomic.Int64 }

func (o roleObjects) Resolve(_ context.Context, q *watchfanoutv1.Query) (*query.Query, error) {
	k := &commonv1.Kind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"}
	return query.New(&registryv1.APIResource{
		Resource:        q.Resource,
		StorageResource: "roles",
		Namespaced:      true,
		Kind:            k,
		StoredKind:      k,
	}, q)
}

func (o roleObjects) Select(context.Context, *query.Query, events.Start) ([]*cache.Item, int64, error) {
	role := cache.ItemOf(&registryv1.Row{Namespace: "x", Name: "z", Json: roleJSON("z", 8)})
	return []*cache.Item{role}, o.revision.Load(), nil
}

func (o roleObjects) Current(context.Context) (int64, error) { return o.revision.Load(), nil }

func roleJSON(name string, revision int64) []byte {
	return fmt.Appendf(nil, `{"metadata":{"name":%q,"resourceVersion":"%d"}}`, name, revision)
}

// eventsOnly is a server of watches of roles over a cache of events only, as in registry.
type eventsOnly struct {
	cache    *cache.Cache
	reader   *logreader.Reader
	tasks    lifecycle.Supervisor
	revision atomic.Int64 // etcd's
	*watch.Server
	servesStale *watch.Server
}

func newEventsOnly(log ...*logv1.Event) *eventsOnly {
	s := &eventsOnly{cache: cache.NewEvents(8 << 20)}
	for _, e := range log {
		s.cache.Apply(e)
		s.revision.Store(max(s.revision.Load(), e.Revision))
	}
	source := logreader.Source{Revision: func(context.Context) (int64, error) { return s.revision.Load(), nil }}
	s.reader = logreader.New(s.cache, nil, source, &s.tasks.Ready, logreader.Config{StaleAfter: 3 * time.Second,
		Differences: prometheus.NewCounterVec(prometheus.CounterOpts{}, []string{"resource"})})
	o := watch.Options{
		Objects:        roleObjects{&s.revision},
		Cache:          s.cache,
		LogReader:      s.reader,
		Converter:      conversion.New(nil, s.cache, 0),
		ProgressPeriod: time.Second,
		OnlyAdvances:   true,
	}
	s.Server = watch.New(o)
	o.ServesStale = true
	s.servesStale = watch.New(o)
	return s
}

// run runs the reader until ctx is done, and applies the beginning of the log again, which the reader expects.
func (s *eventsOnly) run(ctx context.Context) {
	s.reader.Run(ctx, &s.tasks)
	synctest.Wait()
	s.cache.Apply(reset(9, 0, ""))
}

// advance advances etcd's revision each 100 ms, and the cache's too if apply is set.
func (s *eventsOnly) advance(d time.Duration, apply bool) {
	for range d / (100 * time.Millisecond) {
		time.Sleep(100 * time.Millisecond)
		if revision := s.revision.Add(1); apply {
			s.cache.Apply(progress(revision))
		}
	}
	synctest.Wait()
}

// recorder is a client that records its frames.
type recorder struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx    context.Context
	mu     sync.Mutex
	frames []*watchfanoutv1.WatchFrame
}

func (s *recorder) Context() context.Context { return s.ctx }

func (s *recorder) Send(m *watchfanoutv1.WatchFrame) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frames = append(s.frames, m)
	return nil
}

// received returns the types and names that the client receives, or the revisions of bookmarks. It checks that each
// boundary is the end of an event.
func (s *recorder) received(t *testing.T) string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, f := range s.frames {
		begin := int32(0)
		for _, m := range f.Boundaries {
			if !bytes.HasSuffix(f.Data[begin:m.End], []byte("}\n")) {
				t.Errorf("a boundary within an event: %q", f.Data[begin:m.End])
			}
			begin = m.End
		}
		for line := range bytes.Lines(append(bytes.Join(f.Initial, nil), f.Data...)) {
			var e struct {
				Type   string
				Object struct {
					Code     int
					Metadata struct{ Name, ResourceVersion string }
				}
			}
			if err := json.Unmarshal(line, &e); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			detail := e.Object.Metadata.Name
			switch e.Type {
			case "BOOKMARK":
				detail = e.Object.Metadata.ResourceVersion
			case "ERROR":
				detail = fmt.Sprint(e.Object.Code)
			}
			out = append(out, e.Type+" "+detail)
		}
	}
	return strings.Join(out, ", ")
}

func roleQuery(labels string) *watchfanoutv1.Query {
	return &watchfanoutv1.Query{
		Resource:      &commonv1.Resource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
		Namespace:     "x",
		LabelSelector: labels,
		Output:        &registryv1.Output{MediaType: frame.JSON},
	}
}

func role(revision int64, index int32, kind logv1.Type, name string, labels map[string]string) *logv1.Event {
	return &logv1.Event{
		Type:            kind,
		Revision:        revision,
		Index:           index,
		StorageResource: "roles",
		Namespace:       "x",
		Name:            name,
		Epoch:           "h",
		Object:          &logv1.Object{Json: roleJSON(name, revision), Labels: labels},
	}
}

func progress(revision int64) *logv1.Event { return &logv1.Event{Revision: revision, Epoch: "h"} }

func reset(revision int64, index int32, storageResource string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        revision,
		Index:           index,
		StorageResource: storageResource,
		Epoch:           "h",
	}
}

// A watch of a cache of events only delivers every change once from any start, also of objects that enter or leave its
// selection. It expires if the cache no longer holds its next event.
func TestWatchesOfEventsOnly(t *testing.T) {
	selected, unselected := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	leaves := role(13, 0, logv1.Type_TYPE_MODIFIED, "c", unselected)
	leaves.Previous = &logv1.Object{Json: roleJSON("c", 13), Labels: selected}
	first := role(11, 0, logv1.Type_TYPE_ADDED, "b", selected)
	first.More = true
	log := func(more ...*logv1.Event) []*logv1.Event {
		return append([]*logv1.Event{reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", selected), first,
			role(11, 1, logv1.Type_TYPE_ADDED, "c", selected),
			role(12, 0, logv1.Type_TYPE_DELETED, "a", selected), leaves}, more...)
	}
	resumeAt := func(revision int64, index int32, epoch string) *watchfanoutv1.WatchRequest {
		return &watchfanoutv1.WatchRequest{ResourceVersion: "10", AllowBookmarks: true, InitialEventsDone: true,
			ResumeAfter: &watchfanoutv1.Position{Revision: revision, Index: index, Epoch: epoch}}
	}
	yes := true
	for name, c := range map[string]struct {
		log     []*logv1.Event
		request *watchfanoutv1.WatchRequest
		labels  string
		want    string
	}{
		"from a list": {log(progress(20)), &watchfanoutv1.WatchRequest{
			ResourceVersion: "10",
			AllowBookmarks:  true,
		}, "team=a", "ADDED b, ADDED c, DELETED a, DELETED c, BOOKMARK 20"},
		"without a selection": {log(progress(20)), &watchfanoutv1.WatchRequest{
			ResourceVersion: "11",
			AllowBookmarks:  true,
		}, "", "DELETED a, MODIFIED c, BOOKMARK 20"},
		"within a transaction": {log(progress(20)), resumeAt(11, 0, "h"), "team=a",
			"ADDED c, DELETED a, DELETED c, BOOKMARK 20"},
		"no bookmarks": {log(progress(20)), &watchfanoutv1.WatchRequest{ResourceVersion: "12"},
			"team=a", "DELETED c"},
		"initial events": {log(progress(20)), &watchfanoutv1.WatchRequest{
			SendInitialEvents: &yes,
			AllowBookmarks:    true,
		}, "", "ADDED z, BOOKMARK 20"},
		"of another epoch":       {log(), resumeAt(11, 0, "restored"), "team=a", "ERROR 410"},
		"from before the log":    {log(), &watchfanoutv1.WatchRequest{ResourceVersion: "5"}, "team=a", "ERROR 410"},
		"from a future revision": {log(), &watchfanoutv1.WatchRequest{ResourceVersion: "99"}, "team=a", "ERROR 410"},
		"after a reset": {log(reset(14, 1, "roles"), role(15, 0, logv1.Type_TYPE_ADDED, "d", selected)),
			resumeAt(12, events.LastIndex, "h"), "team=a", "ERROR 410"},
		"from a list after a reset": {log(reset(14, 1, "roles"), role(15, 0, logv1.Type_TYPE_ADDED, "d", selected)),
			resumeAt(14, events.LastIndex, "h"), "team=a", "ADDED d"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newEventsOnly(c.log...)
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				c.request.Query = roleQuery(c.labels)
				client := &recorder{ctx: ctx}
				err := server.Watch(c.request, client)
				if got := client.received(t); got != c.want {
					t.Errorf("it delivers %q, not %q (%v)", got, c.want, err)
				}
				last := client.frames[len(client.frames)-1]
				if strings.Contains(c.want, "ERROR") != last.End {
					t.Errorf("ended: %v", last.End)
				}
				if strings.HasSuffix(c.want, "20") && last.Position.Revision != 20 {
					t.Errorf("its last position is %v", last.Position)
				}
			})
		})
	}
}

// A watch that is open when its CRD changes ends without an error, also if it has received nothing yet. A watch that
// begins before the change is expired.
func TestAnOpenWatchEndsWhenItsCRDChanges(t *testing.T) {
	changed := reset(14, 0, "roles")
	changed.CrdChanged = true
	for open, want := range map[bool]string{true: "", false: "ERROR 410"} {
		server := newEventsOnly(reset(9, 0, ""), changed)
		client := &recorder{ctx: t.Context()}
		err := server.Watch(&watchfanoutv1.WatchRequest{
			Query: roleQuery(""), ResourceVersion: "13", Open: open,
			ResumeAfter: &watchfanoutv1.Position{Revision: 13, Index: events.LastIndex, Epoch: "h"},
		}, client)
		last := client.frames[len(client.frames)-1]
		if got := client.received(t); err != nil || got != want || !last.End {
			t.Errorf("open: %v: %q, %v", open, got, err)
		}
		if changedAt := map[bool]int64{true: 14}[open]; last.CrdChangedAt != changedAt {
			t.Errorf("open: %v: the end is of a change at revision %d, not %d", open, last.CrdChangedAt, changedAt)
		}
	}
}

// A watch begins after the log of etcd's epoch has been read. If it is not, only a server of stale watches begins it.
func TestWatchesAwaitTheEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newEventsOnly(reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", nil))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		request := &watchfanoutv1.WatchRequest{Query: roleQuery(""), ResourceVersion: "9"}
		read := make(chan struct{})
		await := func(context.Context) error {
			<-read
			return status.Error(codes.Unavailable, "not read")
		}
		server.AwaitEpoch, server.servesStale.AwaitEpoch = await, await
		client, stale := &recorder{ctx: ctx}, &recorder{ctx: ctx}
		go func() { _ = server.servesStale.Watch(request, stale) }()
		synctest.Wait()
		if got := stale.received(t); got != "" {
			t.Errorf("before the epoch is known, it delivers %q", got)
		}
		close(read)
		if err := server.Watch(request, client); status.Code(err) != codes.Unavailable {
			t.Errorf("a watch of another epoch ends with %v", err)
		}
		synctest.Wait()
		if got := stale.received(t); got != "ADDED a" {
			t.Errorf("a server of stale watches delivers %q", got)
		}
		cancel()
	})
}

// A bookmark that is due is sent as soon as the cache advances.
func TestADueBookmarkIsSentAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newEventsOnly(reset(9, 0, ""))
		ctx, cancel := context.WithCancel(t.Context())
		client, ended := &recorder{ctx: ctx}, make(chan error, 1)
		request := &watchfanoutv1.WatchRequest{Query: roleQuery(""), ResourceVersion: "9", AllowBookmarks: true}
		go func() { ended <- server.Watch(request, client) }()
		time.Sleep(3500 * time.Millisecond)
		server.cache.Apply(progress(15))
		synctest.Wait()
		cancel()
		<-ended
		if got := client.received(t); got != "BOOKMARK 15" {
			t.Errorf("it receives %q", got)
		}
	})
}

// A watch that begins before the cache has read the log sleeps until then. If the watch does not sleep, the test hangs.
func TestAWatchSleepsUntilTheLogIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, yes := newEventsOnly(), true
		server.revision.Store(9)
		ctx, cancel := context.WithCancel(t.Context())
		client, ended := &recorder{ctx: ctx}, make(chan error, 1)
		request := &watchfanoutv1.WatchRequest{Query: roleQuery(""), SendInitialEvents: &yes, AllowBookmarks: true}
		go func() { ended <- server.servesStale.Watch(request, client) }()
		synctest.Wait()
		server.cache.Apply(reset(9, 0, ""))
		server.cache.Apply(role(10, 0, logv1.Type_TYPE_ADDED, "a", nil))
		synctest.Wait()
		cancel()
		err := <-ended
		if got := client.received(t); got != "ADDED z, BOOKMARK 9, ADDED a" {
			t.Errorf("it receives %q, %v", got, err)
		}
	})
}

// A draining process ends its watches with UNAVAILABLE after their pending events.
func TestADrainedWatchIsUnavailable(t *testing.T) {
	server := newEventsOnly(reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", nil))
	server.Drain()
	client := &recorder{ctx: t.Context()}
	err := server.Watch(&watchfanoutv1.WatchRequest{Query: roleQuery(""), ResourceVersion: "9"}, client)
	if got := client.received(t); status.Code(err) != codes.Unavailable || got != "ADDED a" {
		t.Errorf("%v after %q", err, got)
	}
}

// A watch ends with UNAVAILABLE if the log stalls. A server that serves stale watches ends it with 410, and the client
// lists from etcd.
func TestAWatchOfAStalledLogEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newEventsOnly(reset(9, 0, ""))
		ctx, cancel := context.WithCancel(t.Context())
		server.reader.Run(ctx, &server.tasks)
		request := &watchfanoutv1.WatchRequest{Query: roleQuery(""), ResourceVersion: "9"}
		ended, expires := make(chan error, 1), make(chan error, 1)
		go func() { ended <- server.Watch(request, &recorder{ctx: ctx}) }()
		own := &recorder{ctx: ctx}
		go func() { expires <- server.servesStale.Watch(request, own) }()
		time.Sleep(10 * time.Second)
		server.revision.Store(12)
		time.Sleep(2 * time.Second)
		select {
		case err := <-ended:
			t.Fatalf("it ends early: %v", err)
		default:
		}
		time.Sleep(4 * time.Second) // of synctest's clock: the next progress frame ends the watch
		if err := <-ended; status.Code(err) != codes.Unavailable {
			t.Errorf("it ends with %v", err)
		}
		if err := server.Watch(request, &recorder{ctx: ctx}); status.Code(err) != codes.Unavailable {
			t.Errorf("another watch ends with %v", err)
		}
		time.Sleep(4 * time.Second) // of synctest's clock: another progress frame
		if err := <-expires; err != nil || own.received(t) != "ERROR 410" {
			t.Errorf("a watch that serves stale ends with %v after %q", err, own.received(t))
		}
		again := make(chan error, 1)
		go func() {
			again <- server.servesStale.Watch(&watchfanoutv1.WatchRequest{
				Query: roleQuery(""), ResourceVersion: "12", // of the client's list
			}, &recorder{ctx: ctx})
		}()
		// The log has caught up.
		server.cache.Apply(role(12, 0, logv1.Type_TYPE_ADDED, "a", nil))
		time.Sleep(12 * time.Second) // of synctest's clock: past the stall bound
		select {
		case err := <-again:
			t.Errorf("a watch of a fresh log ends with %v", err)
		default:
		}
		cancel()
		<-again
		server.tasks.Wait()
	})
}
