package watch

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// fakeTier is a watch tier with a log of numbered events. It records its requests.
type fakeTier struct {
	watchfanoutv1.WatchClient
	mu          sync.Mutex
	log         []int64
	low         int64
	maxRevision int64 // the revision that the tier has reached; 0: any
	changedAt   int64 // the revision of the CRD's change, which ends every new watch; 0: none
	changed     chan struct{}
	requests    []*watchfanoutv1.WatchRequest
	contexts    []context.Context
	broken      chan struct{}
	calls       []*tierCall
}

// Watches serves each watch of the call with Watch.
func (t *fakeTier) Watches(ctx context.Context, _ ...grpc.CallOption) (
	grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &tierCall{
		ctx:     ctx,
		tier:    t,
		frames:  make(chan *watchfanoutv1.WatchFrame),
		broken:  t.broken,
		watches: map[uint64]context.CancelFunc{},
	}
	t.calls = append(t.calls, c)
	return c, nil
}

// tierCall is a call of Watches.
type tierCall struct {
	grpc.BidiStreamingClient[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]
	ctx     context.Context
	tier    *fakeTier
	frames  chan *watchfanoutv1.WatchFrame
	broken  chan struct{}
	watches map[uint64]context.CancelFunc
}

func (c *tierCall) Send(r *watchfanoutv1.WatchesRequest) error {
	if r.Watch == nil {
		c.watches[r.WatchId]()
		return nil
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.watches[r.WatchId] = cancel
	s, err := c.tier.Watch(ctx, r.Watch)
	go func() {
		for {
			var m *watchfanoutv1.WatchFrame
			if err == nil {
				m, err = s.Recv()
			}
			if err != nil {
				m = &watchfanoutv1.WatchFrame{Status: &watchfanoutv1.WatchStatus{Code: int32(status.Code(err))}}
			}
			m.WatchId = r.WatchId
			select {
			case c.frames <- m:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return nil
}

func (c *tierCall) Recv() (*watchfanoutv1.WatchFrame, error) {
	select {
	case m := <-c.frames:
		return m, nil
	case <-c.broken:
		return nil, status.Error(codes.Unavailable, "killed")
	case <-c.ctx.Done():
		return nil, status.FromContextError(c.ctx.Err()).Err()
	}
}

func newTier() *fakeTier { return &fakeTier{changed: make(chan struct{}), broken: make(chan struct{})} }

func (t *fakeTier) write(revisions ...int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.log = append(t.log, revisions...)
	close(t.changed)
	t.changed = make(chan struct{})
}

// changeCRD changes the CRD at a revision.
func (t *fakeTier) changeCRD(revision int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changedAt = revision
}

// breakStreams ends every stream, like a killed replica.
func (t *fakeTier) breakStreams() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.broken)
	t.broken = make(chan struct{})
}

// waitForStreams waits until n streams have been opened.
func (t *fakeTier) waitForStreams(tt *testing.T, n int) {
	tt.Helper()
	for until := time.Now().Add(2 * time.Minute); len(t.streams()) < n; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			tt.Fatalf("%d streams", len(t.streams()))
		}
	}
}

// waitForReceivers waits until the hub's broadcasts have n receivers.
func (h *Hub) waitForReceivers(t *testing.T, n int) {
	t.Helper()
	got := -1
	for until := time.Now().Add(2 * time.Minute); got != n; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d receivers", got)
		}
		got = 0
		h.mu.Lock()
		for _, b := range h.broadcasts {
			b.mu.Lock()
			got += len(b.receivers)
			b.mu.Unlock()
		}
		h.mu.Unlock()
	}
}

func (t *fakeTier) streams() []*watchfanoutv1.WatchRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests
}

type tierStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	ctx      context.Context
	tier     *fakeTier
	revision int64
	first    []*watchfanoutv1.WatchFrame
	broken   chan struct{}
	expired  bool
	columns  bool
}

func (t *fakeTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	_ ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.requests, t.contexts = append(t.requests, r), append(t.contexts, ctx)
	s := &tierStream{ctx: ctx, tier: t, broken: t.broken}
	switch {
	case t.changedAt != 0:
		s.first = []*watchfanoutv1.WatchFrame{{End: true, CrdChangedAt: t.changedAt}}
		return s, nil
	case r.ResumeAfter != nil:
		s.revision = r.ResumeAfter.Revision
		s.expired = s.revision < t.low
	default: // initial events: the state is a single object
		s.revision = t.log[len(t.log)-1]
		s.first = append(s.first, &watchfanoutv1.WatchFrame{
			Data:              []byte("initial\n"),
			InitialEventsDone: true,
			Position:          &watchfanoutv1.Position{Revision: s.revision, Index: events.LastIndex},
		})
	}
	if !s.expired && (t.maxRevision == 0 || s.revision <= t.maxRevision) {
		s.first = append(s.first, &watchfanoutv1.WatchFrame{Position: &watchfanoutv1.Position{
			Revision: s.revision,
			Index:    events.LastIndex,
		}})
	}
	return s, nil
}

func (s *tierStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	if s.expired {
		s.expired = false
		return &watchfanoutv1.WatchFrame{Data: []byte("410\n"), End: true}, nil
	}
	if len(s.first) > 0 {
		m := s.first[0]
		s.first = s.first[1:]
		return m, nil
	}
	for {
		s.tier.mu.Lock()
		select {
		case <-s.broken: // a killed replica sends no later event
			s.tier.mu.Unlock()
			return nil, status.Error(codes.Unavailable, "killed")
		default:
		}
		for _, r := range s.tier.log {
			if r > s.revision {
				s.revision = r
				s.tier.mu.Unlock()
				data := []byte(fmt.Sprintf("e%d\n", r))
				p := &watchfanoutv1.Position{Revision: r}
				boundary := &watchfanoutv1.EventBoundary{End: int32(len(data)), Position: p}
				if r%10 == 0 { // every tenth is a bookmark
					copy(data, "b")
					boundary.Bookmark = true
				}
				s.columns = s.columns || !boundary.Bookmark
				return &watchfanoutv1.WatchFrame{
					Data:        data,
					Position:    p,
					Boundaries:  []*watchfanoutv1.EventBoundary{boundary},
					ColumnsSent: s.columns,
				}, nil
			}
		}
		changed := s.tier.changed
		s.tier.mu.Unlock()
		select {
		case <-changed:
		case <-s.broken:
			return nil, status.Error(codes.Unavailable, "killed")
		case <-s.ctx.Done():
			return nil, status.FromContextError(s.ctx.Err()).Err()
		}
	}
}

// recordingSink is a client that records the data it receives.
type recordingSink struct {
	mu      sync.Mutex
	text    strings.Builder
	changed chan struct{}
	// While block is open, a write waits, and blocked receives.
	block, blocked chan struct{}
}

func newScreen() *recordingSink { return &recordingSink{changed: make(chan struct{}, 100000)} }

func (s *recordingSink) SendHeaders(bool)                        {}
func (s *recordingSink) Hijack(context.Context) *h2writer.Stream { return nil }

func (s *recordingSink) Fail(err error) {
	_ = s.Write(context.Background(), time.Hour, []byte(err.Error()))
}

func (s *recordingSink) Write(ctx context.Context, writeTimeout time.Duration, frames ...[]byte) error {
	if s.block != nil {
		select {
		case s.blocked <- struct{}{}:
		default:
		}
		select {
		case <-s.block:
		case <-time.After(writeTimeout):
			return h2writer.ErrSlowClient
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	for _, f := range frames {
		s.text.Write(f)
	}
	s.mu.Unlock()
	s.changed <- struct{}{}
	return nil
}

func (s *recordingSink) expect(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(2 * time.Minute)
	for {
		s.mu.Lock()
		got := strings.ReplaceAll(s.text.String(), "\n", " ")
		s.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-s.changed:
		case <-deadline:
			t.Fatalf("received %q, want %q", got, want)
		}
	}
}

type client struct {
	*recordingSink
	cancel context.CancelFunc
	done   chan struct{}
}

func (h *Hub) watch(t *testing.T, change func(*Request)) *client {
	s := newScreen()
	return h.watchWith(t, s, s, change)
}

// watchWith serves a watch with a sink that is, or embeds, s.
func (h *Hub) watchWith(t *testing.T, sink Sink, s *recordingSink, change func(*Request)) *client {
	c := &client{recordingSink: s, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	c.cancel = cancel
	r := &Request{
		WatchRequest: &watchfanoutv1.WatchRequest{
			ResourceVersion: "5",
			Query:           &watchfanoutv1.Query{Resource: &commonv1.Resource{Version: "v1", Resource: "pods"}},
		},
		StorageResource: "pods",
		Deadline:        time.Now().Add(time.Minute),
		BookmarkPeriod:  h.Config.BookmarkPeriod,
		PolicyChanged: func() <-chan struct{} {
			return nil
		},
		Allowed: func(context.Context) bool { return true },
	}
	if change != nil {
		change(r)
	}
	go func() { defer close(c.done); h.Serve(ctx, r, sink) }()
	t.Cleanup(func() { cancel(); <-c.done })
	return c
}

func hub(t *fakeTier) *Hub {
	return &Hub{
		Client:      t,
		Discovery:   &fakeDiscovery{},
		MemoryQuota: new(MemoryQuota),
		Revision:    func(context.Context, string) (int64, error) { return 1000, nil },
		Config: &Config{
			BookmarkPeriod:      time.Minute,
			WriteTimeout:        time.Second,
			BroadcastBytes:      1 << 20,
			BroadcastTotalBytes: 1 << 30,
		},
	}
}

// fakeDiscovery serves every resource until gone is set.
type fakeDiscovery struct {
	gone atomic.Bool
	// await is AwaitCRD. Nil: the CRD is there.
	await func(ctx context.Context, revision int64)
}

func (d *fakeDiscovery) Serves(*commonv1.Resource) bool { return !d.gone.Load() }

func (d *fakeDiscovery) AwaitCRD(ctx context.Context, _ *commonv1.Resource, revision int64) {
	if d.await != nil {
		d.await(ctx, revision)
	}
}
