package watch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/core"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

func TestEqualQueriesShareOneBroadcast(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	a := h.watch(t, nil)
	a.expect(t, "e6 e7 ")
	b := h.watch(t, func(r *Request) { r.ResourceVersion = "6" })
	b.expect(t, "e7 ")
	c := h.watch(t, func(r *Request) { r.ResourceVersion = "9" }) // from a server that is ahead
	up.write(8, 9, 11)
	a.expect(t, "e6 e7 e8 e9 e11 ")
	b.expect(t, "e7 e8 e9 e11 ")
	c.expect(t, "e11 ")
	if n := len(up.streams()); n != 2 { // the first client's own, and the broadcast's
		t.Errorf("%d streams", n)
	}
	other := h.watch(t, func(r *Request) { r.Query.LabelSelector = "a=b" })
	other.expect(t, "e6 e7 e8 e9 e11 ")
	if n := len(up.streams()); n != 4 {
		t.Errorf("%d streams for two queries", n)
	}
	shard := h.watch(t, func(r *Request) { r.Query.Shard = &watchfanoutv1.Shard{Selector: "a"} })
	shard.expect(t, "e6 e7 e8 e9 e11 ")
	if n := len(up.streams()); n != 6 {
		t.Errorf("%d streams for three queries", n)
	}
}

// A replica delays large events by owner, so an owner's streams must not carry another owner's watches.
func TestOwnersShareNoStream(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	for i, owner := range []string{"a", "b", "a"} {
		h.watch(t, func(r *Request) { r.Owner = owner }).expect(t, "e6 ")
		if i < 2 {
			up.waitForStreams(t, 2*i+2) // the client's own stream, and the broadcast's
		}
	}
	owners := map[string]int{}
	for _, r := range up.streams() {
		owners[r.Owner]++
	}
	if owners["a"] == 0 || owners["b"] != 2 || owners[""] != 0 {
		t.Errorf("streams by owner: %v", owners)
	}
}

func TestInitialEventsPrecedeBroadcast(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	first := h.watch(t, func(r *Request) { r.ResourceVersion = "7" })
	up.waitForStreams(t, 2) // its own, and the broadcast's
	unsynced := h.watch(t, func(r *Request) { r.ResourceVersion = "" })
	unsynced.expect(t, "initial ")
	up.write(8)
	unsynced.expect(t, "initial e8 ")
	first.expect(t, "e8 ")
	up.write(9)
	unsynced.expect(t, "initial e8 e9 ")
	unsynced.cancel()
	<-unsynced.done
	if n := len(up.streams()); n != 3 {
		t.Errorf("%d streams", n)
	}
}

func TestUnsyncedWatchCatchesUp(t *testing.T) {
	up := newTier()
	up.write(6, 7, 8)
	h := hub(up)
	ahead := h.watch(t, func(r *Request) { r.ResourceVersion = "7" })
	ahead.expect(t, "e8 ")
	behind := h.watch(t, nil)
	behind.expect(t, "e6 e7 e8 ")
	up.write(9)
	behind.expect(t, "e6 e7 e8 e9 ")
	ahead.expect(t, "e8 e9 ")
}

// A broadcast may start too early for the log. Only its first client gets the error.
func TestExpiredWatchDoesNotEndOthers(t *testing.T) {
	up := newTier()
	up.low = 5
	up.write(6)
	h := hub(up)
	old := h.watch(t, func(r *Request) { r.ResourceVersion = "3" })
	fine := h.watch(t, func(r *Request) { r.ResourceVersion = "5" })
	old.expect(t, "410 ")
	<-old.done
	fine.expect(t, "e6 ")
	up.write(7)
	fine.expect(t, "e6 e7 ")
}

func TestSlowClientDoesNotEndOthers(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.WriteTimeout = 50 * time.Millisecond
	slow, quick := h.watch(t, nil), h.watch(t, nil)
	slow.block = make(chan struct{})
	up.write(6)
	quick.expect(t, "e6 ")
	<-slow.done
	up.write(7)
	quick.expect(t, "e6 e7 ")
}

// The events held for receivers that are behind are bounded. A receiver that is trimmed continues with its own stream.
func TestTrimmedReceiverBecomesUnsynced(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BroadcastBytes = 3 * (core.EntryBytes + 4)
	h.Config.WriteTimeout = time.Minute
	slow := h.watch(t, nil)
	up.waitForStreams(t, 2) // its own and the broadcast's
	quick := h.watch(t, nil)
	h.waitForReceivers(t, 2)
	before := len(up.streams())
	slow.block = make(chan struct{})
	want := ""
	for r := int64(11); r < 19; r++ {
		up.write(r)
		want += fmt.Sprintf("e%d ", r)
		quick.expect(t, want)
	}
	close(slow.block)
	slow.expect(t, want)
	if n := len(up.streams()) - before; n != 1 {
		t.Errorf("%d more streams, want the slow watch's", n)
	}
}

func TestBookmarksComeWhenTheyAreDue(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BookmarkPeriod = 0
	with := h.watch(t, func(r *Request) { r.AllowBookmarks = true })
	without := h.watch(t, nil)
	rare := hub(up).watch(t, func(r *Request) { r.AllowBookmarks = true })
	up.write(9, 10)
	with.expect(t, "e9 b10 ")
	up.write(11)
	with.expect(t, "e9 b10 e11 ")
	without.expect(t, "e9 e11 ")
	rare.expect(t, "e9 e11 ")
}

func TestTheLastBookmarkComesBeforeTheEnd(t *testing.T) {
	up := newTier()
	up.write(9, 10)
	h := hub(up)
	c := h.watch(t, func(r *Request) {
		r.AllowBookmarks = true
		r.Deadline = time.Now().Add(lastBookmarkLead + 100*time.Millisecond)
	})
	c.expect(t, "e9 b10 ")
	<-c.done
}

func TestARevokedPermissionEndsAWatch(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	policyChanged, allowed := make(chan struct{}), true
	var mu sync.Mutex
	revocable := h.watch(t, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { mu.Lock(); defer mu.Unlock(); return policyChanged }
		r.Allowed = func(context.Context) bool { mu.Lock(); defer mu.Unlock(); return allowed }
	})
	other := h.watch(t, nil)
	revocable.expect(t, "e6 ")
	mu.Lock()
	old := policyChanged
	policyChanged, allowed = make(chan struct{}), false
	mu.Unlock()
	close(old)
	<-revocable.done
	up.write(7)
	other.expect(t, "e6 e7 ")
}

// heldTier is a tier whose streams have no frame until release is closed.
type heldTier struct {
	*fakeTier
	release chan struct{}
}

func (u heldTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	o ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	s, err := u.fakeTier.Watch(ctx, r, o...)
	return heldStream{s, u.release}, err
}

type heldStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	release chan struct{}
}

func (s heldStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	<-s.release
	return s.ServerStreamingClient.Recv()
}

// A watch that catches up during its reauthorization has no decision yet. It is reauthorized again.
func TestARevokedPermissionEndsAWatchThatCatchesUp(t *testing.T) {
	up := newTier()
	h := hub(up)
	release, asked := make(chan struct{}), make(chan struct{})
	h.Client = heldTier{up, release}
	var mu sync.Mutex
	policyChanged, calls := make(chan struct{}), 0
	c := h.watch(t, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { mu.Lock(); defer mu.Unlock(); return policyChanged }
		r.Allowed = func(ctx context.Context) bool {
			mu.Lock()
			calls++
			n := calls
			mu.Unlock()
			if n == 2 {
				close(asked)
				<-ctx.Done()
			}
			return n < 3
		}
	})
	up.waitForStreams(t, 1)
	mu.Lock()
	old := policyChanged
	policyChanged = make(chan struct{})
	mu.Unlock()
	close(old)
	<-asked
	close(release)
	c.expectEnd(t)
}

// slowHijack is a client whose connection delays the hijack until release is closed.
type slowHijack struct {
	*recordingSink
	hijacking, release chan struct{}
}

// Hijack implements Sink.
func (s slowHijack) Hijack(context.Context) *h2writer.Stream {
	close(s.hijacking)
	<-s.release
	return nil
}

// A watch whose connection delays it receives no event that is later than the revocation.
func TestARevokedPermissionEndsAWatchThatJoins(t *testing.T) {
	up := newTier()
	sink := slowHijack{newScreen(), make(chan struct{}), make(chan struct{})}
	policyChanged, calls := make(chan struct{}), 0
	c := hub(up).watchWith(t, sink, sink.recordingSink, func(r *Request) {
		r.PolicyChanged = func() <-chan struct{} { return policyChanged }
		r.Allowed = func(context.Context) bool { calls++; return calls == 1 }
	})
	<-sink.hijacking
	up.write(6)
	close(policyChanged)
	up.waitForStreams(t, 2) // the broadcast's
	close(sink.release)
	c.expectEnd(t)
	c.expect(t, "")
}

// removableTier is a tier that does not serve the resource once gone is set.
type removableTier struct {
	*fakeTier
	gone *atomic.Bool
}

func (u removableTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	o ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	if u.gone.Load() {
		return nil, status.Error(codes.Unavailable, "not in discovery")
	}
	return u.fakeTier.Watch(ctx, r, o...)
}

// A watch of a deleted CRD ends. It is not held open for another replica.
func TestWatchEndsWithItsCRD(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	d := &fakeDiscovery{}
	h.Discovery, h.Client = d, removableTier{up, &d.gone}
	a, b := h.watch(t, nil), h.watch(t, nil)
	a.expect(t, "e6 ")
	b.expect(t, "e6 ")
	d.gone.Store(true)
	up.breakStreams()
	began := time.Now()
	<-a.done
	<-b.done
	if took := time.Since(began); took > resumeTimeout/2 {
		t.Errorf("they are held open for %v", took)
	}
}

// The watch of a changed or deleted CRD is open until the gateway's discovery has the change. Otherwise its client may
// list the resource of a deleted CRD.
func TestTheEndOfAChangedCRDsWatchAwaitsDiscovery(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	awaited, discovered := make(chan int64, 2), make(chan struct{})
	h.Discovery = &fakeDiscovery{await: func(ctx context.Context, revision int64) {
		if end, ok := ctx.Deadline(); !ok || time.Until(end) > crdTimeout {
			t.Error("the wait for discovery has no bound")
		}
		awaited <- revision
		select {
		case <-discovered:
		case <-ctx.Done():
			t.Error("the wait for discovery ended first")
		}
	}}
	a, b := h.watch(t, nil), h.watch(t, nil)
	a.expect(t, "e6 ")
	b.expect(t, "e6 ")
	up.changeCRD(7)
	up.breakStreams()
	for range 2 {
		select {
		case at := <-awaited:
			if at != 7 {
				t.Errorf("discovery is awaited as of %d", at)
			}
		case <-a.done:
			t.Fatal("the first watch ended before discovery had the change")
		case <-b.done:
			t.Fatal("the second watch ended before discovery had the change")
		}
	}
	close(discovered)
	<-a.done
	<-b.done
}

// A watch that awaits discovery ends at its deadline, and when the gateway stops.
func TestTheWaitForDiscoveryEnds(t *testing.T) {
	up := newTier()
	up.write(6)
	up.changeCRD(7)
	h := hub(up)
	h.Discovery = &fakeDiscovery{await: func(ctx context.Context, _ int64) { <-ctx.Done() }}
	stopping := make(chan struct{})
	close(stopping)
	for name, change := range map[string]func(*Request){
		"deadline": func(r *Request) { r.Deadline = time.Now().Add(100 * time.Millisecond) },
		"stopping": func(r *Request) { r.Stopping = stopping },
	} {
		began := time.Now()
		<-h.watch(t, change).done
		if took := time.Since(began); took > crdTimeout/2 {
			t.Errorf("%s: it ended after %v", name, took)
		}
	}
}

// failingTier rejects the first watches.
type failingTier struct {
	*fakeTier
	failures *atomic.Int64
}

func (u failingTier) Watch(ctx context.Context, r *watchfanoutv1.WatchRequest,
	o ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	if u.failures.Add(-1) >= 0 {
		return nil, status.Error(codes.Unavailable, "no replica")
	}
	return u.fakeTier.Watch(ctx, r, o...)
}

// A watch whose client has only the headers waits for a replica, because no initial event must be sent again.
func TestAWatchWithoutItsFirstEventResumes(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	h.Config.BookmarkPeriod = 0 // sends the headers at once
	failures := new(atomic.Int64)
	failures.Store(2)
	h.Client = failingTier{up, failures}
	h.watch(t, func(r *Request) { r.ResourceVersion = "" }).expect(t, "initial ")
	if n := failures.Load(); n > -1 {
		t.Errorf("%d failures are left", n)
	}
}

// A Table's first row carries the columns, so it comes on the client's own stream.
func TestTableJoinsAfterFirstRow(t *testing.T) {
	up := newTier()
	h := hub(up)
	table := func(r *Request) {
		r.Query.Output = &registryv1.Output{As: &commonv1.Kind{Kind: "Table"}}
	}
	a, b := h.watch(t, table), h.watch(t, table)
	up.write(6)
	a.expect(t, "e6 ")
	b.expect(t, "e6 ")
	up.write(7, 8)
	a.expect(t, "e6 e7 e8 ")
	b.expect(t, "e6 e7 e8 ")
	own := 0
	for _, r := range up.streams() {
		if !r.ColumnsSent {
			own++
		}
	}
	if n := len(up.streams()); own != 2 ||
		n != 3 { // their own two and the broadcast's, in any order
		t.Errorf("%d streams, %d without columns sent", n, own)
	}
}

// A client that is ahead of the broadcast keeps its position when events before it are skipped.
func TestJoinRepeatsNoEvent(t *testing.T) {
	b := &watchBroadcast{
		hub:       hub(newTier()),
		Broadcast: core.NewBroadcast(events.Position{Revision: 80, Index: 0}),
		cancel:    func() {},
	}
	r := b.join(nil, events.Position{Revision: 100, Index: events.LastIndex})
	b.dispatch(&watchfanoutv1.WatchFrame{Data: []byte("e95\n"), Position: &watchfanoutv1.Position{Revision: 95},
		Boundaries: []*watchfanoutv1.EventBoundary{{End: 4, Position: &watchfanoutv1.Position{Revision: 95}}}})
	if parts, err := b.next(r); len(parts) > 0 || err != nil {
		t.Errorf("%q %v", parts, err)
	}
	if position := b.leave(r); position != (events.Position{Revision: 100, Index: events.LastIndex}) {
		t.Errorf("its position is %v", position)
	}
}

// A client may name a future revision. Other clients do not wait for it.
func TestFutureRevisionStartsNoBroadcast(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	up.maxRevision = 6
	future := h.watch(t, func(r *Request) { r.ResourceVersion = "900" })
	present := h.watch(t, nil)
	present.expect(t, "e6 ")
	h.mu.Lock()
	for _, b := range h.broadcasts {
		b.mu.Lock()
		if p := b.High; p.Revision > 6 {
			t.Errorf("a broadcast starts at %v", p)
		}
		b.mu.Unlock()
	}
	h.mu.Unlock()
	up.write(7)
	present.expect(t, "e6 e7 ")
	future.expect(t, "")
}

// A bookmark carries no columns, so the next row must.
func TestABookmarkIsNotATablesFirstRow(t *testing.T) {
	up := newTier()
	h := hub(up)
	h.Config.BookmarkPeriod = time.Nanosecond
	c := h.watch(t, func(r *Request) {
		r.Query.Output = &registryv1.Output{As: &commonv1.Kind{Kind: "Table"}}
		r.AllowBookmarks = true
	})
	up.write(10)
	c.expect(t, "b10 ")
	up.write(11)
	c.expect(t, "b10 e11 ")
	if requests := up.streams(); requests[0].ColumnsSent {
		t.Error("the first row comes from a shared stream")
	}
}

// A revision that etcd has not reached is from another epoch. The client does not join a broadcast, which would skip
// the events up to that revision (F3).
func TestUnknownRevisionIsNotJoined(t *testing.T) {
	up := newTier()
	up.write(6, 7)
	h := hub(up)
	h.Revision = func(context.Context, string) (int64, error) { return 10, nil }
	a := h.watch(t, nil)
	a.expect(t, "e6 e7 ")
	before := len(up.streams())
	h.watch(t, func(r *Request) { r.ResourceVersion = "500" })
	for until := time.Now().Add(2 * time.Minute); len(up.streams()) == before; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the tier receives no request")
		}
	}
}
