package watch

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// streamSink is the sink of a response over HTTP/2.
type streamSink struct {
	w   http.ResponseWriter
	req *http.Request
}

func (s streamSink) SendHeaders(bool) { s.w.(http.Flusher).Flush() }
func (s streamSink) Fail(error)       { http.Error(s.w, "failed", http.StatusInternalServerError) }

func (s streamSink) Write(context.Context, time.Duration, ...[]byte) error {
	return errors.New("the stream is not hijacked")
}

func (s streamSink) Hijack(ctx context.Context) *h2writer.Stream {
	stream := h2writer.StreamFrom(s.req)
	for until := time.Now().Add(2 * time.Minute); !stream.Hijack(ctx, 0); time.Sleep(time.Millisecond) {
		if time.Now().After(until) || ctx.Err() != nil { // the connection's window comes after the request
			return nil
		}
	}
	return stream
}

// detachedServer serves watches of a hub over HTTP/2.
type detachedServer struct {
	*Hub
	tier   *fakeTier
	url    string
	client *http.Client
	change func(*Request) // for the next watch
	// returned counts the handlers of watches that have returned from Serve, and ended counts the ends of watches.
	returned, ended atomic.Int64
}

func newDetachedServer(t *testing.T) *detachedServer {
	tier := newTier()
	s := &detachedServer{Hub: hub(tier), tier: tier}
	s.RateLimiter, s.InflightQuota = new(RateLimiter), new(InflightQuota)
	s.Config.UserRate = 1000
	srv, client := serveHTTP2(t, 100, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer h2writer.AtEnd(req, func(any) { s.ended.Add(1) })
		r := &Request{
			WatchRequest: &watchfanoutv1.WatchRequest{
				ResourceVersion: "5",
				AllowBookmarks:  true,
				Query:           &watchfanoutv1.Query{Resource: &commonv1.Resource{Version: "v1", Resource: "pods"}},
				Owner:           "a",
			},
			StorageResource: "pods",
			Deadline:        time.Now().Add(time.Minute),
			BookmarkPeriod:  time.Minute,
			PolicyChanged:   func() <-chan struct{} { return nil },
			Allowed:         func(context.Context) bool { return true },
			Detached:        context.Background(),
		}
		s.change(r)
		s.Serve(req.Context(), r, streamSink{w, req})
		s.returned.Add(1)
	}))
	s.url, s.client = srv.URL, client
	return s
}

// body is the response of a watch.
type body struct {
	lines *bufio.Reader
	leave context.CancelFunc
}

// open opens a watch, and waits until it is parked.
func (s *detachedServer) open(t *testing.T, change func(*Request)) body {
	t.Helper()
	s.change = change
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", s.url, nil)
	if err != nil {
		t.Fatal(err)
	}
	n := s.returned.Load()
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); resp.Body.Close() })
	s.waitFor(t, "its handler has returned", func() bool { return s.returned.Load() == n+1 })
	return body{bufio.NewReader(resp.Body), cancel}
}

func (s *detachedServer) waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for until := time.Now().Add(2 * time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func (b body) expect(t *testing.T, lines ...string) {
	t.Helper()
	for _, want := range lines {
		if got, err := b.lines.ReadString('\n'); got != want+"\n" {
			t.Fatalf("%q (%v), want %q", got, err, want)
		}
	}
}

func (b body) expectEnd(t *testing.T) {
	t.Helper()
	if rest, err := io.ReadAll(b.lines); err != nil || len(rest) > 0 {
		t.Fatalf("at the end: %q, %v", rest, err)
	}
}

// expectNothingLeft waits until ended watches hold nothing.
func (s *detachedServer) expectNothingLeft(t *testing.T, ended int64) {
	t.Helper()
	s.waitFor(t, "the watches have ended", func() bool { return s.ended.Load() == ended })
	s.waitForReceivers(t, 0)
	s.signals.mu.Lock()
	defer s.signals.mu.Unlock()
	if n := len(s.signals.groups); n > 0 {
		t.Errorf("%d channels still wake watches", n)
	}
	s.InflightQuota.mu.Lock()
	defer s.InflightQuota.mu.Unlock()
	if n := len(s.InflightQuota.owners); n > 0 {
		t.Errorf("%d owners still have a quota", n)
	}
}

func unchanged(*Request) {}

// A watch that is a receiver has no handler. It receives events and ends as any other.
func TestAnIdleWatchHasNoHandler(t *testing.T) {
	s := newDetachedServer(t)
	s.tier.write(6)
	first := s.open(t, unchanged)
	first.expect(t, "e6")
	b := s.open(t, func(r *Request) { r.ResourceVersion = "6" })
	for _, revision := range []int64{7, 8} {
		s.tier.write(revision)
	}
	b.expect(t, "e7", "e8")
	first.expect(t, "e7", "e8")
	if n := s.ended.Load(); n > 0 {
		t.Errorf("%d watches have ended", n)
	}
	b.leave()
	first.leave()
	s.expectNothingLeft(t, 2)
}

func TestADetachedWatchEndsAtItsDeadline(t *testing.T) {
	s := newDetachedServer(t)
	s.tier.write(6)
	b := s.open(t, func(r *Request) { r.Deadline = time.Now().Add(lastBookmarkLead + 300*time.Millisecond) })
	b.expect(t, "e6")
	s.tier.write(7, 10) // 10 is a bookmark, which is due once the deadline is near
	b.expect(t, "e7", "b10")
	b.expectEnd(t)
	s.expectNothingLeft(t, 1)
}

func TestADetachedWatchEndsWithTheGateway(t *testing.T) {
	s := newDetachedServer(t)
	stopping := make(chan struct{})
	b := s.open(t, func(r *Request) { r.Stopping = stopping })
	close(stopping)
	b.expectEnd(t)
	s.expectNothingLeft(t, 1)
}

// Each change of the policy makes the gateway authorize a detached watch again.
func TestADetachedWatchIsReauthorized(t *testing.T) {
	s := newDetachedServer(t)
	var mu sync.Mutex
	changed, checks, allowed := make(chan struct{}), 0, true
	b := s.open(t, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { mu.Lock(); defer mu.Unlock(); return changed }
		r.Allowed = func(context.Context) bool { mu.Lock(); defer mu.Unlock(); checks++; return allowed }
	})
	revoke := func(still bool) {
		mu.Lock()
		defer mu.Unlock()
		close(changed)
		changed, allowed = make(chan struct{}), still
	}
	for n := range 3 {
		revoke(true)
		s.waitFor(t, "it is authorized", func() bool { mu.Lock(); defer mu.Unlock(); return checks == n+2 })
	}
	s.tier.write(6)
	b.expect(t, "e6")
	revoke(false)
	b.expectEnd(t)
	s.expectNothingLeft(t, 1)
}

// A detached watch whose broadcast is lost continues with its own stream.
func TestADetachedWatchSurvivesItsBroadcast(t *testing.T) {
	s := newDetachedServer(t)
	s.tier.write(6)
	var all []body
	for range 20 {
		all = append(all, s.open(t, unchanged))
	}
	s.waitForReceivers(t, len(all))
	s.Hub.mu.Lock()
	for _, b := range s.broadcasts {
		b.cancel()
	}
	s.Hub.mu.Unlock()
	s.waitForReceivers(t, 0)
	s.tier.write(7, 8)
	for _, b := range all {
		b.expect(t, "e6", "e7", "e8")
		b.leave()
	}
	s.expectNothingLeft(t, int64(len(all)))
}

// A panic of a watch resets its stream, and leaves nothing.
func TestAPanicEndsADetachedWatch(t *testing.T) {
	s := newDetachedServer(t)
	changed, checks := make(chan struct{}), 0
	b := s.open(t, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { return changed }
		r.Allowed = func(context.Context) bool {
			if checks++; checks > 1 {
				panic("a fault of the test")
			}
			return true
		}
	})
	close(changed)
	if _, err := io.ReadAll(b.lines); err == nil {
		t.Error("the client sees no error")
	}
	s.expectNothingLeft(t, 1)
}
