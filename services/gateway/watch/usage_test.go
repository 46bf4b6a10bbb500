package watch

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Context has the address of a replica.
func (c *tierCall) Context() context.Context {
	return peer.NewContext(c.ctx, &peer.Peer{Addr: &net.UnixAddr{Name: "/directory/replica", Net: "unix"}})
}

// Usages count watches and bytes by user, also of users that share a broadcast. They include the events that wait for a
// slow client. A user without recent watches has no entry.
func TestUsages(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	usages := &Usages{Hubs: []*Hub{h}}
	h.Usages, h.Config.WriteTimeout = usages, time.Hour
	now := time.Now()
	snapshot := func(after time.Duration) []Usage {
		all := usages.Snapshot(now.Add(after))
		slices.SortFunc(all, func(a, b Usage) int { return strings.Compare(a.User, b.User) })
		return all
	}
	watch := func(user string) *client { return h.watch(t, func(r *Request) { r.User = user }) }
	a, b := watch("alice"), watch("alice")
	c := watch("bob")
	for _, client := range []*client{a, b, c} {
		client.expect(t, "e6 ")
	}
	h.waitForReceivers(t, 3)
	if all := snapshot(0); len(all) != 2 || all[0].Watches != 2 || all[0].BytesPerSecond != 0 {
		t.Errorf("%+v", all)
	}
	c.block, c.blocked = make(chan struct{}), make(chan struct{}, 1)
	up.write(7)
	a.expect(t, "e6 e7 ")
	b.expect(t, "e6 e7 ")
	<-c.blocked
	up.write(8, 9)
	a.expect(t, "e6 e7 e8 e9 ")
	b.expect(t, "e6 e7 e8 e9 ")
	replicas := []string{"unix:replica"}
	want := []Usage{
		{User: "alice", Resource: "pods", Watches: 2, BytesPerSecond: 1.8, Replicas: replicas},
		{User: "bob", Resource: "pods", Watches: 1, Behind: 2, BytesPerSecond: .3, Replicas: replicas},
	}
	if all := snapshot(10 * time.Second); !reflect.DeepEqual(all, want) { // a client's event has 3 bytes
		t.Errorf("%+v", all)
	}
	close(c.block)
	c.expect(t, "e6 e7 e8 e9 ")
	b.cancel()
	<-b.done
	want[0].Watches, want[0].BytesPerSecond = 1, .9
	want[1].Behind, want[1].BytesPerSecond = 0, .45
	if all := snapshot(20 * time.Second); !reflect.DeepEqual(all, want) { // of 20 s, also of the watch that has ended
		t.Errorf("%+v", all)
	}
	a.cancel()
	<-a.done
	c.cancel()
	<-c.done
	for i, last := range []bool{false, true} { // the rates are of the last two windows
		all := snapshot(time.Duration(30+10*i) * time.Second)
		if len(all) != 2 || all[0].Watches+all[1].Watches != 0 || (len(usages.entries) == 0) != last {
			t.Errorf("%+v", all)
		}
	}
	if all := snapshot(50 * time.Second); len(all) != 0 || usages.closed != 0 {
		t.Errorf("%d entries, %+v", usages.closed, all)
	}
}

// A client that ends its watch before each snapshot remains in the map, with its bytes. The number of such entries is
// bounded.
func TestUsagesOfEndedWatches(t *testing.T) {
	usages, now := &Usages{}, time.Now()
	request := &Request{User: "alice", WatchRequest: &watchfanoutv1.WatchRequest{}}
	for i := range 5 {
		e := usages.join(request)
		e.add(1000)
		e.leave()
		all := usages.Snapshot(now.Add(time.Duration(10*i) * time.Second))
		if len(all) != 1 || all[0].Watches != 0 || i > 0 && all[0].BytesPerSecond != 100 {
			t.Errorf("%+v", all)
		}
	}
	var open []*usage
	for i := range 2 * maxClosed {
		request.User = fmt.Sprint(i)
		open = append(open, usages.join(request))
	}
	for _, e := range open {
		e.leave()
	}
	if len(usages.entries) != maxClosed || usages.closed != maxClosed {
		t.Errorf("%d entries, %d without watches", len(usages.entries), usages.closed)
	}
	request.User = "0"
	usages.join(request)
	if usages.closed != maxClosed-1 {
		t.Errorf("%d entries without watches", usages.closed)
	}
}

// A receiver that leaves during a snapshot is counted once, so that the next rate is right.
func TestAReceiverLeavesDuringASnapshot(t *testing.T) {
	up := newTier()
	up.write(6)
	h, last := hub(up), hub(up)
	usages, now := &Usages{Hubs: []*Hub{h, last}}, time.Now()
	h.Usages = usages
	a, b := h.watch(t, nil), h.watch(t, nil)
	for _, c := range []*client{a, b} {
		c.expect(t, "e6 ")
	}
	h.waitForReceivers(t, 2)
	up.write(7)
	for _, c := range []*client{a, b} {
		c.expect(t, "e6 e7 ")
	}
	last.mu.Lock() // the snapshot waits here after it has scanned the receivers
	snapshot := make(chan struct{})
	go func() { defer close(snapshot); usages.Snapshot(now) }()
	waitFor(t, "the receivers are not scanned", func() bool {
		usages.mu.Lock()
		defer usages.mu.Unlock()
		return usages.entries[usageKey{resource: "pods"}].bytes.Load() == 12
	})
	a.cancel()
	<-a.done
	last.mu.Unlock()
	<-snapshot
	up.write(8)
	b.expect(t, "e6 e7 e8 ")
	if all := usages.Snapshot(now.Add(10 * time.Second)); len(all) != 1 || all[0].BytesPerSecond != .3 {
		t.Errorf("%+v", all)
	}
}

// Two long names of service accounts differ in their namespaces or in their tails.
func TestShortNames(t *testing.T) {
	account := func(namespace, tail string) string {
		namespace = strings.Repeat("n", 62) + namespace
		return ShortName("system:serviceaccount:" + namespace + ":" + strings.Repeat("x", 252) + tail)
	}
	if a := account("1", "1"); a == account("2", "1") || a == account("1", "2") || len(a) != maxName+len("…") {
		t.Error(a)
	}
	longest := strings.Repeat("x", maxName)
	for text, want := range map[string]string{"alice": "alice", "a\xffb": "a\uFFFDb", longest: longest} {
		if got := ShortName(text); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
	usages := &Usages{}
	usages.join(&Request{User: strings.Repeat("x", 1<<20), WatchRequest: &watchfanoutv1.WatchRequest{}})
	if all := usages.Snapshot(time.Now()); len(all[0].User) > 2*maxName {
		t.Errorf("%d bytes", len(all[0].User))
	}
}

// replica serves a fakeTier over gRPC.
type replica struct {
	watchfanoutv1.UnimplementedWatchServer
	tier  *fakeTier
	calls atomic.Int64 // of Watches
}

func (s *replica) Watch(r *watchfanoutv1.WatchRequest, out grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	in, err := s.tier.Watch(out.Context(), r)
	for err == nil {
		var m *watchfanoutv1.WatchFrame
		if m, err = in.Recv(); err == nil {
			err = out.Send(m)
		}
	}
	return err
}

func (s *replica) Watches(
	out grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]) error {
	s.calls.Add(1)
	call, err := s.tier.Watches(out.Context())
	if err != nil {
		return err
	}
	var frames sync.WaitGroup
	defer frames.Wait()
	frames.Go(func() {
		for {
			m, err := call.Recv()
			if err != nil || out.Send(m) != nil {
				return
			}
		}
	})
	for {
		r, err := out.Recv()
		if err != nil {
			return err
		}
		if err := call.Send(r); err != nil {
			return err
		}
	}
}

// A usage names the replica at the other end of a call of Watches over gRPC, for each broadcast of the call.
func TestTheReplicaOfASharedCall(t *testing.T) {
	s := &replica{tier: newTier()}
	s.tier.write(6)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "replica-1.rpc"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	watchfanoutv1.RegisterWatchServer(server, s)
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	conn, err := grpc.NewClient("unix:"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	h := hub(s.tier)
	h.Client, h.Usages = watchfanoutv1.NewWatchClient(conn), &Usages{Hubs: []*Hub{h}}
	users := []string{"alice", "bob"}
	var clients []*client
	for _, user := range users {
		clients = append(clients, h.watch(t, func(r *Request) {
			r.User, r.Query.FieldSelector = user, "metadata.name="+user
		}))
	}
	for _, c := range clients {
		c.expect(t, "e6 ")
	}
	h.waitForReceivers(t, len(users))
	s.tier.write(7)
	for _, c := range clients {
		c.expect(t, "e6 e7 ")
	}
	all := h.Usages.Snapshot(time.Now())
	for _, u := range all {
		if !slices.Equal(u.Replicas, []string{"unix:replica-1.rpc"}) {
			t.Errorf("%+v", u)
		}
	}
	if len(all) != len(users) || s.calls.Load() != 1 {
		t.Errorf("%d usages, %d calls", len(all), s.calls.Load())
	}
}
