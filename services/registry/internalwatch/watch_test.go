package internalwatch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/watchcache"
)

// recordingStream is a stream that records its frames.
type recordingStream struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx    context.Context
	frames []*watchfanoutv1.WatchFrame
}

func (s *recordingStream) Context() context.Context { return s.ctx }

func (s *recordingStream) Send(m *watchfanoutv1.WatchFrame) error {
	s.frames = append(s.frames, m)
	return nil
}

// events returns the types and names that a client receives, or the revisions of bookmarks. It checks that each
// boundary is the end of an event.
func (s *recordingStream) events(t *testing.T) string {
	t.Helper()
	var out []string
	for _, f := range s.frames {
		begin := int32(0)
		for _, m := range f.Boundaries {
			if !bytes.HasSuffix(f.Data[begin:m.End], []byte("}\n")) {
				t.Errorf("a boundary within an event: %q", f.Data[begin:m.End])
			}
			begin = m.End
		}
		for _, line := range bytes.Split(bytes.TrimSpace(f.Data), []byte{'\n'}) {
			var e struct {
				Type   string
				Object struct {
					Code     int
					Metadata struct{ Name, ResourceVersion string }
				}
			}
			if len(line) == 0 {
				continue
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

func role(revision int64, index int32, kind logv1.Type, name string, labels map[string]string) *logv1.Event {
	e := event(revision, index, "roles")
	e.Type, e.Namespace, e.Name = kind, "x", name
	e.Object = &logv1.Object{
		Json:   fmt.Appendf(nil, `{"metadata":{"name":%q,"resourceVersion":"%d"}}`, name, revision),
		Labels: labels,
	}
	return e
}

func event(revision int64, index int32, storageResource string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_MODIFIED,
		Revision:        revision,
		Index:           index,
		StorageResource: storageResource,
		Epoch:           "h",
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

func newCacheOf(t *testing.T, all ...*logv1.Event) *watchcache.Cache {
	t.Helper()
	out := watchcache.New()
	out.Reset()
	for _, e := range all {
		if err := out.Apply(e); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// newWatch returns a watch of roles over a cache.
func newWatch(
	t *testing.T,
	cache *watchcache.Cache,
	r *watchfanoutv1.WatchRequest,
	labels string,
) (w *watch, s *recordingStream) {
	t.Helper()
	k := &commonv1.Kind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"}
	selector, err := watchcache.NewSelector("x", labels, "")
	if err != nil {
		t.Fatal(err)
	}
	s = &recordingStream{}
	return &watch{cache: cache, draining: make(chan struct{}), request: r, stream: s,
		view: &view{
			server:      &InternalWatch{cache: cache},
			apiResource: &registryv1.APIResource{StorageResource: "roles", Kind: k, StoredKind: k},
			form:        frame.EncodingOf(k, nil, frame.JSON, false),
			selector:    selector,
			native:      true,
		}}, s
}

// A watch delivers every change once from any start position, also of objects that enter or leave its selection.
func TestWatchDeliversEachChangeOnce(t *testing.T) {
	selected, unselected := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	leaves := role(13, 0, logv1.Type_TYPE_MODIFIED, "c", unselected)
	leaves.Previous = &logv1.Object{Json: []byte(`{"metadata":{"name":"c","resourceVersion":"13"}}`), Labels: selected}
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
		"of another epoch":    {log(), resumeAt(11, 0, "restored"), "team=a", "ERROR 410"},
		"from before the log": {log(), &watchfanoutv1.WatchRequest{ResourceVersion: "5"}, "team=a", "ERROR 410"},
		"after a reset": {log(reset(14, 1, "roles"), role(15, 0, logv1.Type_TYPE_ADDED, "d", selected)),
			resumeAt(12, events.LastIndex, "h"), "team=a", "DELETED c, ERROR 410"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newCacheOf(t, c.log...)
				w, s := newWatch(t, l, c.request, c.labels)
				ctx, cancel := context.WithTimeout(t.Context(), 3*bookmarkPeriod)
				defer cancel()
				err := w.run(ctx)
				if got := s.events(t); got != c.want {
					t.Errorf("it delivers %q, not %q (%v)", got, c.want, err)
				}
				last := s.frames[len(s.frames)-1]
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

// A draining registry ends its watches with Unavailable after their pending events.
func TestDrainedWatchIsUnavailable(t *testing.T) {
	w, s := newWatch(t, newCacheOf(t, reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", nil)),
		&watchfanoutv1.WatchRequest{ResourceVersion: "9"}, "")
	draining := make(chan struct{})
	close(draining)
	w.draining = draining
	if err := w.run(t.Context()); status.Code(err) != codes.Unavailable || s.events(t) != "ADDED a" {
		t.Errorf("%v after %q", err, s.events(t))
	}
}

// The cache compares its revision with etcd's and requests progress if it is behind. If progress does not arrive,
// watches end with Unavailable.
func TestRequestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cache := newCacheOf(t, reset(9, 0, ""))
		revision, requests, responding := int64(9), 0, true
		var mu sync.Mutex
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- cache.RequestProgress(ctx, func(context.Context) (int64, error) {
				mu.Lock()
				defer mu.Unlock()
				return revision, nil
			}, func() error {
				mu.Lock()
				defer mu.Unlock()
				if requests++; responding {
					_ = cache.Apply(progress(revision))
				}
				return nil
			})
		}()
		wait := func(d time.Duration) { // in the bubble's time
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			<-ctx.Done()
			synctest.Wait()
		}
		set := func(r int64, responds bool) {
			mu.Lock()
			defer mu.Unlock()
			revision, responding = r, responds
		}
		wait(10 * watchcache.ProgressPeriod)
		if requests != 0 || cache.Stalled() {
			t.Errorf("%d progress requests of a cache that is not behind", requests)
		}
		set(12, true)
		wait(10 * watchcache.ProgressPeriod)
		if requests != 1 || cache.Stalled() {
			t.Errorf("%d progress requests", requests)
		}
		set(15, false)
		wait(10 * watchcache.ProgressPeriod)
		w, s := newWatch(t, cache, &watchfanoutv1.WatchRequest{ResourceVersion: "12"}, "")
		if err := w.run(t.Context()); !cache.Stalled() || status.Code(err) != codes.Unavailable || len(s.frames) != 1 {
			t.Errorf("stalled: %v, %v", cache.Stalled(), err)
		}
		set(15, true)
		wait(2 * watchcache.ProgressPeriod)
		if cache.Stalled() {
			t.Error("the cache is still stalled")
		}
		for r := int64(20); r < 60; r++ { // always behind, and advancing
			set(r+5, false)
			wait(watchcache.ProgressPeriod)
			_ = cache.Apply(progress(r))
			if cache.Stalled() {
				t.Fatal("a log that is behind and advances is stalled")
			}
		}
		cancel()
		<-done
	})
}
