package watch

import (
	"context"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/peer"
)

// Context has the address of a replica.
func (c *tierCall) Context() context.Context {
	return peer.NewContext(c.ctx, &peer.Peer{Addr: &net.UnixAddr{Name: "/replica", Net: "unix"}})
}

// Usages count watches and bytes by user, also of users that share a broadcast. They include the events that wait for a
// slow client. A user without watches has no entry.
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
	c.block = make(chan struct{})
	up.write(7)
	a.expect(t, "e6 e7 ")
	b.expect(t, "e6 e7 ")
	up.write(8, 9)
	a.expect(t, "e6 e7 e8 e9 ")
	b.expect(t, "e6 e7 e8 e9 ")
	want := []Usage{
		{User: "alice", Resource: "pods", Watches: 2, BytesPerSecond: 1.8, Replicas: []string{"unix:/replica"}},
		{User: "bob", Resource: "pods", Watches: 1, Behind: 2, BytesPerSecond: .3, Replicas: []string{"unix:/replica"}},
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
	if all := snapshot(30 * time.Second); len(all) != 0 || len(usages.entries) != 0 {
		t.Errorf("%+v", all)
	}
}
