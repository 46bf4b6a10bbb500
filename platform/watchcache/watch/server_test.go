package watch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// frames is the client's end of a watch stream.
type frames struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx context.Context
	c   chan *watchfanoutv1.WatchFrame
	// done receives the Done of each tracked message. If it is nil, SendMsg calls Done itself.
	done chan func()
}

func (f *frames) Context() context.Context { return f.ctx }

func (f *frames) Send(m *watchfanoutv1.WatchFrame) error {
	select {
	case f.c <- m:
		return nil
	case <-f.ctx.Done():
		return f.ctx.Err()
	}
}

func (f *frames) SendMsg(m any) error {
	tracked := m.(*rpc.TrackedFrame)
	if f.done != nil {
		f.done <- tracked.Done
	} else {
		defer tracked.Done()
	}
	return f.Send(tracked.WatchFrame)
}

// testWatch is one watch: the messages that it received, and its error.
type testWatch struct {
	t     *testing.T
	c     chan *watchfanoutv1.WatchFrame
	ended chan error
	leave context.CancelFunc
}

func start(t *testing.T, s *watch.Server, r *watchfanoutv1.WatchRequest) *testWatch {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	o := &testWatch{t: t, c: make(chan *watchfanoutv1.WatchFrame, 100), ended: make(chan error, 1), leave: cancel}
	if multiplexed {
		go func() { o.ended <- watchInCall(ctx, s, r, o.c) }()
	} else {
		go func() { o.ended <- s.Watch(r, &frames{ctx: ctx, c: o.c}) }()
	}
	t.Cleanup(cancel)
	return o
}

// receive waits for n events and describes them.
func (o *testWatch) receive(n int) string {
	o.t.Helper()
	var out []string
	deadline := time.After(2 * time.Minute)
	for len(out) < n {
		select {
		case f := <-o.c:
			data := append(bytes.Join(f.Initial, nil), f.Data...)
			for line := range bytes.Lines(data) {
				var e struct {
					Type   string
					Object struct {
						Kind              string
						Code              int
						ColumnDefinitions []any
						Metadata          struct{ Name, ResourceVersion string }
					}
				}
				if err := json.Unmarshal(line, &e); err != nil {
					o.t.Fatalf("%v: %s", err, line)
				}
				detail := e.Object.Metadata.Name
				switch {
				case e.Type == "ERROR":
					detail = fmt.Sprint(e.Object.Code)
				case e.Type == "BOOKMARK":
					detail = e.Object.Metadata.ResourceVersion
				case e.Object.Kind == "Table":
					detail = fmt.Sprintf("row, %d columns", len(e.Object.ColumnDefinitions))
				}
				out = append(out, e.Type+" "+detail)
			}
		case <-deadline:
			o.t.Fatalf("after %q nothing comes", out)
		}
	}
	return strings.Join(out, ", ")
}

func newServer(t *testing.T) (*fixture.Fixture, *watch.Server) {
	w := fixture.New(t)
	return w, watch.New(optionsOf(w))
}

// optionsOf returns the options of a replica's server of watches.
func optionsOf(w *fixture.Fixture) watch.Options {
	return watch.Options{
		Objects:        &watch.Cached{Discovery: w.Discovery, Cache: w.Cache, LogReader: w.LogReader},
		Cache:          w.Cache,
		LogReader:      w.LogReader,
		Converter:      w.Converter,
		ProgressPeriod: time.Hour,
	}
}

// A large event is a message of its own. Each message has the position of its last event. If a message is lost, another
// replica resumes from the position of the message before it.
func TestALargeEventIsSentAlone(t *testing.T) {
	w, s := newServer(t)
	w.Apply(logv1.Type_TYPE_ADDED, 10, "before", "", "")
	w.Apply(logv1.Type_TYPE_ADDED, 11, "a", "", "")
	w.Apply(logv1.Type_TYPE_ADDED, 12, "b", "", "")
	w.Apply(logv1.Type_TYPE_ADDED, 13, strings.Repeat("c", 5000), "", "")
	w.Apply(logv1.Type_TYPE_ADDED, 14, "d", "", "")
	o := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10"})
	for _, want := range []struct {
		revision int64
		marks    int
	}{{10, 0}, {12, 2}, {13, 1}, {14, 1}} {
		select {
		case f := <-o.c:
			if f.Position.GetRevision() != want.revision || len(f.Boundaries) != want.marks {
				t.Errorf("a message of %d events is at %d, not one of %d at %d", len(f.Boundaries), f.Position.GetRevision(),
					want.marks, want.revision)
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("nothing comes")
		}
	}
}

// A watch whose owner has too many bytes in flight waits without holding events. It then sends each event once, in
// order, or ends if the log has lost them.
func TestAWaitingWatchHoldsNoEvents(t *testing.T) {
	const rounds, updates, size = 60, 8, 20_000 // the ring has a megabyte, and an object has its name three times
	w, s := newServer(t)
	s.BoundInFlight(1)
	done := make(chan func(), 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first := &frames{ctx: ctx, c: make(chan *watchfanoutv1.WatchFrame, 100), done: done}
	go s.Watch(&watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10", Owner: "o"}, first)
	revision := int64(fixture.FirstRevision)
	update := func() {
		for i := range updates {
			revision++
			w.Apply(logv1.Type_TYPE_ADDED, revision, strings.Repeat(fmt.Sprint(i), size), "", "")
		}
	}
	update()
	release := <-done // the owner's only message in flight
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var all []*testWatch
	for n := range rounds {
		w := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), Owner: "o",
			ResourceVersion: fmt.Sprint(revision - updates)})
		all = append(all, w)
		for until := time.Now().Add(2 * time.Minute); s.Waiting("o") < n+2; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%d messages are waiting", s.Waiting("o"))
			}
		}
		if n < rounds-1 {
			update()
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > rounds*updates*size/2 {
		t.Errorf("%d waiting watches hold %d bytes", rounds, grown)
	}
	last := all[rounds-1]
	for _, w := range all[:rounds-1] { // this test has no log that could serve their events
		w.leave()
	}
	cancel()
	release()
	for i := range updates {
		name := strings.Repeat(fmt.Sprint(i), size)
		if got := last.receive(1); got != "ADDED "+name {
			t.Fatalf("event %d is %.20s of %d bytes", i, got, len(got))
		}
	}
}

// A watch receives every change after its revision once, as its selector sees it.
func TestAWatchReceivesSelectedEvents(t *testing.T) {
	w, s := newServer(t)
	q := fixture.Query()
	q.FieldSelector = "spec.nodeName=node-1"
	o := start(t, s, &watchfanoutv1.WatchRequest{Query: q, ResourceVersion: "10"})
	all := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10"})
	w.Apply(logv1.Type_TYPE_ADDED, 11, "d", "node-0", "")
	w.Apply(logv1.Type_TYPE_MODIFIED, 12, "d", "node-1", "node-0")
	w.Apply(logv1.Type_TYPE_MODIFIED, 13, "d", "node-1", "")
	w.Apply(logv1.Type_TYPE_MODIFIED, 14, "d", "node-2", "node-1")
	w.Apply(logv1.Type_TYPE_DELETED, 15, "d", "node-2", "")
	if got, want := o.receive(3), "ADDED d, MODIFIED d, DELETED d"; got != want {
		t.Errorf("%s", got)
	}
	if got, want := all.receive(5), "ADDED d, MODIFIED d, MODIFIED d, MODIFIED d, DELETED d"; got != want {
		t.Errorf("%s", got)
	}
}

// A watch with initial events receives every object, then a bookmark if it has sendInitialEvents, then new events.
func TestInitialEvents(t *testing.T) {
	w, s := newServer(t)
	yes := true
	named := start(t, s, &watchfanoutv1.WatchRequest{
		Query:             fixture.Query(),
		SendInitialEvents: &yes,
		AllowBookmarks:    true,
	})
	if got := named.receive(4); got != "ADDED a, ADDED b, ADDED c, BOOKMARK 10" {
		t.Error(got)
	}
	plain := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "0"})
	if got := plain.receive(3); got != "ADDED a, ADDED b, ADDED c" {
		t.Error(got)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 11, "d", "node-0", "")
	for _, o := range []*testWatch{named, plain} {
		if got := o.receive(1); got != "ADDED d" {
			t.Error(got)
		}
	}
	table := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Table(fixture.Query()), ResourceVersion: "0"})
	if got := table.receive(4); got != "ADDED row, 1 columns, ADDED row, 0 columns, ADDED row, 0 columns, ADDED row, "+
		"0 columns" {
		t.Error(got)
	}
}

// Initial events that registry encodes are sent in batches: a client that does not read has few of them in memory.
func TestInitialRowsAreEncodedInBatches(t *testing.T) {
	w, s := newServer(t)
	for i := range 600 {
		w.Apply(logv1.Type_TYPE_ADDED, int64(11+i), fmt.Sprintf("p%03d", i), "node-0", "")
	}
	large := strings.Repeat("x", 40<<10) // each row is a message
	w.Registry.Cell.Store(&large)
	var encoded atomic.Int64
	w.Registry.EncodeError = func([]byte) error { encoded.Add(1); return nil }
	o := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Table(fixture.Query()), ResourceVersion: "0"})
	o.receive(1)
	if n := encoded.Load(); n == 0 || n >= 600 {
		t.Errorf("%d rows are encoded when the first arrives", n)
	}
	o.receive(602)
	if n := encoded.Load(); n != 603 {
		t.Errorf("%d rows are encoded", n)
	}
}

// A watch ends with an ERROR event if registry rejects an object, after the events before the object's. A lost
// connection to registry is no such end.
func TestAWatchOfAnObjectThatRegistryRejects(t *testing.T) {
	for name, x := range map[string]struct {
		err  error
		want string
	}{
		"a webhook that fails": {rpc.ToStatus(errors.New("no way")), "ADDED row, 1 columns, ERROR 500"},
		"a reset stream":       {status.Error(codes.Internal, "RST_STREAM"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			w, s := newServer(t)
			w.Registry.EncodeError = func(json []byte) error {
				if bytes.Contains(json, []byte(`"name":"rejected"`)) {
					return x.err
				}
				return nil
			}
			w.Apply(logv1.Type_TYPE_ADDED, 11, "d", "node-0", "")
			w.Apply(logv1.Type_TYPE_ADDED, 12, "rejected", "node-0", "")
			o := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Table(fixture.Query()), ResourceVersion: "10"})
			if x.want != "" {
				if got := o.receive(2); got != x.want {
					t.Error(got)
				}
			}
			if err := <-o.ended; (err == nil) != (x.want != "") {
				t.Errorf("the watch ends with %v", err)
			}
			for len(o.c) > 0 {
				if f := <-o.c; bytes.Contains(f.Data, []byte("ERROR")) {
					t.Errorf("%s", f.Data)
				}
			}
		})
	}
}

// The initial events of a single name need no other object. An unreadable object fails watches of its own name and of
// its namespace.
func TestInitialEventsOfASingleName(t *testing.T) {
	w, s := newServer(t)
	w.Registry.Unreadable.Store(true)
	for selector, want := range map[string]string{
		"metadata.name=a":                      "ADDED a, BOOKMARK 10",
		"metadata.name=d":                      "BOOKMARK 10",
		"metadata.name=a,spec.nodeName=node-1": "BOOKMARK 10",
		"metadata.name=ab":                     "ERROR 500",
		"metadata.name!=a":                     "ERROR 500",
	} {
		q, yes := fixture.Query(), true
		q.FieldSelector = selector
		r := &watchfanoutv1.WatchRequest{Query: q, SendInitialEvents: &yes, AllowBookmarks: true}
		if got := start(t, s, r).receive(1 + strings.Count(want, ",")); got != want {
			t.Errorf("%s: %s, not %s", selector, got, want)
		}
	}
}

// A watch resumes after its position. It expires if the position is before the log or of another epoch.
func TestResume(t *testing.T) {
	w, s := newServer(t)
	w.Apply(logv1.Type_TYPE_ADDED, 11, "d", "node-0", "")
	w.Apply(logv1.Type_TYPE_ADDED, 12, "e", "node-0", "")
	resumeAt := func(revision int64, index int32, epoch string) *testWatch {
		return start(t, s, &watchfanoutv1.WatchRequest{
			Query:             fixture.Query(),
			ResourceVersion:   "10",
			InitialEventsDone: true,
			ResumeAfter:       events.Position{Revision: revision, Index: index, Epoch: epoch}.Proto(),
		})
	}
	if got := resumeAt(11, 0, "h").receive(1); got != "ADDED e" {
		t.Error(got)
	}
	if got := resumeAt(11, 0, "another").receive(1); got != "ERROR 410" {
		t.Error(got)
	}
	if got := start(t, s, &watchfanoutv1.WatchRequest{
		Query:           fixture.Query(),
		ResourceVersion: "x",
	}).receive(1); got != "ERROR 400" {
		t.Error(got)
	}
}

// If the objects of a replica differ from etcd's, its watches expire, also a watch at the newest revision: their
// clients may have wrong objects. A client that has listed since watches on.
func TestWatchesOfDifferingObjectsExpire(t *testing.T) {
	w, s := newServer(t)
	first := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "0"})
	if got := first.receive(3); got != "ADDED a, ADDED b, ADDED c" {
		t.Error(got)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 11, "d", "node-0", "")
	if got := first.receive(1); got != "ADDED d" {
		t.Error(got)
	}
	objects, loaded := w.Cache.Resource("pods").Loaded()
	if !loaded || !objects.ResetDiffering() {
		t.Fatal("the resource is not reset")
	}
	if got := first.receive(1); got != "ERROR 410" {
		t.Error(got)
	}
	resumed := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10"})
	if got := resumed.receive(1); got != "ERROR 410" {
		t.Error(got)
	}
	listed := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "11"})
	w.Apply(logv1.Type_TYPE_ADDED, 12, "e", "node-0", "")
	if got := listed.receive(1); got != "ADDED e" {
		t.Error(got)
	}
}

// A draining replica ends its watches with UNAVAILABLE, so that they resume on another replica.
func TestADrainingReplicaEndsItsWatches(t *testing.T) {
	_, s := newServer(t)
	o := start(t, s, &watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10"})
	<-o.c // the stream is open
	if s.Len() != 1 {
		t.Errorf("%d are open", s.Len())
	}
	s.Drain()
	select {
	case err := <-o.ended:
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it goes on")
	}
}

// A watch of a resource that the replica has not discovered ends with UNAVAILABLE. It expires if its epoch is another,
// and ends if its CRD has changed since.
func TestAWatchOfAnUndiscoveredResource(t *testing.T) {
	w, s := newServer(t)
	w.Cache.Apply(&logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        12,
		StorageResource: "widgets.example.com",
		CrdChanged:      true,
		Epoch:           "h",
	})
	for name, c := range map[string]struct {
		revision int64
		history  string
		want     string
	}{
		"of another epoch":           {10, "another", "ERROR 410"},
		"before the CRD was deleted": {11, "h", "end"},
		"after the CRD changed":      {13, "h", codes.Unavailable.String()},
		"not yet open":               {0, "", codes.Unavailable.String()},
	} {
		q := fixture.Query()
		q.Resource = &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
		r := &watchfanoutv1.WatchRequest{Query: q, ResourceVersion: "10"}
		if c.revision > 0 {
			r.ResumeAfter = events.Position{Revision: c.revision, Index: events.LastIndex, Epoch: c.history}.Proto()
		}
		o := start(t, s, r)
		var got string
		select {
		case err := <-o.ended:
			if got = status.Code(err).String(); err == nil {
				got = "end"
				if f := <-o.c; !f.End || len(f.Data) == 0 && f.CrdChangedAt != 12 {
					t.Errorf("%s: %v", name, f)
				} else if len(f.Data) > 0 {
					o.c <- f
					got = o.receive(1)
				}
			}
		case <-time.After(2 * time.Minute):
			got = "open"
		}
		if got != c.want {
			t.Errorf("%s: %s, not %s", name, got, c.want)
		}
	}
}
