package policy

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
	"watershed.dev/services/registry/tail"
)

// watching is a stream that keeps what it was sent.
type watching struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx    context.Context
	frames []*watchfanoutv1.WatchFrame
}

func (s *watching) Context() context.Context { return s.ctx }

func (s *watching) Send(m *watchfanoutv1.WatchFrame) error {
	s.frames = append(s.frames, m)
	return nil
}

// shows is what a client sees: types and names, or where a bookmark is. Each mark is checked to end where its event
// does.
func (s *watching) shows(t *testing.T) string {
	t.Helper()
	var out []string
	for _, f := range s.frames {
		begin := int32(0)
		for _, m := range f.Boundaries {
			if !bytes.HasSuffix(f.Data[begin:m.End], []byte("}\n")) {
				t.Errorf("a mark amid an event: %q", f.Data[begin:m.End])
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
			what := e.Object.Metadata.Name
			switch e.Type {
			case "BOOKMARK":
				what = e.Object.Metadata.ResourceVersion
			case "ERROR":
				what = fmt.Sprint(e.Object.Code)
			}
			out = append(out, e.Type+" "+what)
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

func event(revision int64, index int32, storedAs string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_MODIFIED,
		Revision:        revision,
		Index:           index,
		StorageResource: storedAs,
		Epoch:           "h",
	}
}

func progress(revision int64) *logv1.Event { return &logv1.Event{Revision: revision, Epoch: "h"} }

func reset(revision int64, index int32, storedAs string) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision, Index: index, StorageResource: storedAs, Epoch: "h"}
}

func tailOf(t *testing.T, all ...*logv1.Event) *tail.Tail {
	t.Helper()
	out := tail.New()
	out.Begin()
	for _, e := range all {
		if err := out.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// watchOf begins a watch of roles over a tail.
func watchOf(t *testing.T, l *tail.Tail, r *watchfanoutv1.WatchRequest, labels string) (w *watch, s *watching) {
	t.Helper()
	k := &commonv1.Kind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"}
	selects, err := tail.NewSelector("x", labels, "")
	if err != nil {
		t.Fatal(err)
	}
	s = &watching{}
	return &watch{tail: l, draining: make(chan struct{}), request: r, stream: s,
		view: &view{
			policy:  &Policy{tail: l},
			entry:   &registryv1.APIResource{StorageResource: "roles", Kind: k, StoredKind: k},
			form:    frame.EncodingOf(k, nil, frame.JSON, false),
			selects: selects,
			native:  true,
		}}, s
}

// Whoever decides is told of every change once, from wherever it goes on: also of objects that come into its selection
// and leave it.
func TestAPolicyWatchTellsEveryChangeOnce(t *testing.T) {
	mine, other := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	leaves := role(13, 0, logv1.Type_TYPE_MODIFIED, "c", other)
	leaves.Previous = &logv1.Object{Json: []byte(`{"metadata":{"name":"c","resourceVersion":"13"}}`), Labels: mine}
	begun := role(11, 0, logv1.Type_TYPE_ADDED, "b", mine)
	begun.More = true
	log := func(more ...*logv1.Event) []*logv1.Event {
		return append([]*logv1.Event{reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", mine), begun,
			role(11, 1, logv1.Type_TYPE_ADDED, "c", mine),
			role(12, 0, logv1.Type_TYPE_DELETED, "a", mine), leaves}, more...)
	}
	at := func(revision int64, index int32, history string) *watchfanoutv1.WatchRequest {
		return &watchfanoutv1.WatchRequest{ResourceVersion: "10", AllowBookmarks: true, InitialEventsDone: true,
			ResumeAfter: &watchfanoutv1.Position{Revision: revision, Index: index, Epoch: history}}
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
		"amid a transaction": {log(progress(20)), at(11, 0, "h"), "team=a",
			"ADDED c, DELETED a, DELETED c, BOOKMARK 20"},
		"no bookmarks": {log(progress(20)), &watchfanoutv1.WatchRequest{ResourceVersion: "12"},
			"team=a", "DELETED c"},
		"of another history":  {log(), at(11, 0, "restored"), "team=a", "ERROR 410"},
		"from before the log": {log(), &watchfanoutv1.WatchRequest{ResourceVersion: "5"}, "team=a", "ERROR 410"},
		"to be read anew": {log(reset(14, 1, "roles"), role(15, 0, logv1.Type_TYPE_ADDED, "d", mine)),
			at(12, events.LastIndex, "h"), "team=a", "DELETED c, ERROR 410"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := tailOf(t, c.log...)
				w, s := watchOf(t, l, c.request, c.labels)
				ctx, cancel := context.WithTimeout(t.Context(), 3*policyBookmarks)
				defer cancel()
				err := w.run(ctx)
				if got := s.shows(t); got != c.want {
					t.Errorf("it shows %q, not %q (%v)", got, c.want, err)
				}
				last := s.frames[len(s.frames)-1]
				if strings.Contains(c.want, "ERROR") != last.End {
					t.Errorf("ended: %v", last.End)
				}
				if strings.HasSuffix(c.want, "20") && last.Position.Revision != 20 {
					t.Errorf("it is said to be at %v", last.Position)
				}
			})
		})
	}
}

// A registry that drains gives its watches to another, at the places where they are.
func TestADrainedPolicyWatchIsUnavailable(t *testing.T) {
	w, s := watchOf(t, tailOf(t, reset(9, 0, ""), role(10, 0, logv1.Type_TYPE_ADDED, "a", nil)),
		&watchfanoutv1.WatchRequest{ResourceVersion: "9"}, "")
	draining := make(chan struct{})
	close(draining)
	w.draining = draining
	if err := w.run(t.Context()); status.Code(err) != codes.Unavailable || s.shows(t) != "ADDED a" {
		t.Errorf("%v after %q", err, s.shows(t))
	}
}

// The tail is compared with etcd; the publisher is asked for what is in no log, and where that does not come, readers
// go elsewhere.
func TestTheTailIsComparedWithEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := tailOf(t, reset(9, 0, ""))
		revision, asked, answered := int64(9), 0, true
		var mu sync.Mutex
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- l.Compare(ctx, func(context.Context) (int64, error) {
				mu.Lock()
				defer mu.Unlock()
				return revision, nil
			}, func() error {
				mu.Lock()
				defer mu.Unlock()
				if asked++; answered {
					_ = l.Append(progress(revision))
				}
				return nil
			})
		}()
		wait := func(d time.Duration) { // of the bubble's own time
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			<-ctx.Done()
			synctest.Wait()
		}
		set := func(r int64, answers bool) {
			mu.Lock()
			defer mu.Unlock()
			revision, answered = r, answers
		}
		wait(10 * tail.ComparePeriod)
		if asked != 0 || l.Stalled() {
			t.Errorf("asked %d times for nothing", asked)
		}
		set(12, true)
		wait(10 * tail.ComparePeriod)
		if asked != 1 || l.Stalled() {
			t.Errorf("asked %d times", asked)
		}
		set(15, false)
		wait(10 * tail.ComparePeriod)
		w, s := watchOf(t, l, &watchfanoutv1.WatchRequest{ResourceVersion: "12"}, "")
		if err := w.run(t.Context()); !l.Stalled() || status.Code(err) != codes.Unavailable || len(s.frames) != 1 {
			t.Errorf("stalled: %v, %v", l.Stalled(), err)
		}
		set(15, true)
		wait(2 * tail.ComparePeriod)
		if l.Stalled() {
			t.Error("it is still said to be behind")
		}
		for r := int64(20); r < 60; r++ { // always a little late, and it comes
			set(r+5, false)
			wait(tail.ComparePeriod)
			_ = l.Append(progress(r))
			if l.Stalled() {
				t.Fatal("a log that is late, and comes, is said to stall")
			}
		}
		cancel()
		<-done
	})
}
