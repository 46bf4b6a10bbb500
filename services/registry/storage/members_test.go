package storage

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fakeMember is an etcd member whose requests for a key wait while it has no leader.
type fakeMember struct {
	etcdserverpb.UnimplementedMaintenanceServer
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedWatchServer

	leaderless, frozen atomic.Bool
	waiting            chan struct{}
	url                string
}

func (f *fakeMember) Status(ctx context.Context, _ *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	if f.frozen.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if f.leaderless.Load() {
		return &etcdserverpb.StatusResponse{}, nil
	}
	return &etcdserverpb.StatusResponse{Leader: 1}, nil
}

func (f *fakeMember) Range(ctx context.Context, _ *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	return &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{}}, f.serve(ctx)
}

func (f *fakeMember) Txn(ctx context.Context, _ *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	return &etcdserverpb.TxnResponse{Header: &etcdserverpb.ResponseHeader{}}, f.serve(ctx)
}

func (f *fakeMember) Watch(stream etcdserverpb.Watch_WatchServer) error {
	return f.serve(stream.Context())
}

func (f *fakeMember) serve(ctx context.Context) error {
	if !f.leaderless.Load() && !f.frozen.Load() {
		return nil
	}
	f.waiting <- struct{}{}
	<-ctx.Done()
	return ctx.Err()
}

// startMembers starts the members of a cluster.
func startMembers(t *testing.T, n int) (fakes []*fakeMember, servers []string) {
	t.Helper()
	for range n {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		f := &fakeMember{waiting: make(chan struct{}, 100), url: "http://" + listener.Addr().String()}
		server := grpc.NewServer()
		etcdserverpb.RegisterMaintenanceServer(server, f)
		etcdserverpb.RegisterKVServer(server, f)
		etcdserverpb.RegisterWatchServer(server, f)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		fakes, servers = append(fakes, f), append(servers, f.url)
	}
	return fakes, servers
}

// openMembers returns a client of a cluster whose members the test checks.
func openMembers(t *testing.T, servers []string) (*members, []*member, *etcdkubernetes.Client) {
	t.Helper()
	m := newMembers()
	cluster, err := m.open(servers, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = closeAll(cluster) })
	client, err := newClient(servers, nil, m.dialer(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return m, cluster, client
}

// The lost member's requests end when it is lost, and it receives no other. Reads are sent to another member. A write
// fails, because etcd may have executed it.
func TestALostMemberIsPassedBy(t *testing.T) {
	for name, lose := range map[string]func(*fakeMember){
		"without a leader": func(f *fakeMember) { f.leaderless.Store(true) },
		"unresponsive":     func(f *fakeMember) { f.frozen.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			fakes, servers := startMembers(t, 3)
			m, cluster, client := openMembers(t, servers)
			calls := map[string]func() error{
				"read": func() error {
					_, err := client.Client.Get(t.Context(), "key")
					return err
				},
				"write": func() error {
					_, err := client.Txn(t.Context()).Then(clientv3.OpPut("key", "")).Commit()
					return err
				},
				"watch": func() error {
					watch, err := etcdserverpb.NewWatchClient(client.ActiveConnection()).Watch(t.Context())
					if err == nil {
						_, err = watch.Recv()
					}
					return err
				},
			}
			lost := fakes[1]
			lose(lost)
			ended := map[string]chan error{}
			for name, call := range calls { // until the lost member has received it
				for ended[name] == nil {
					done := make(chan error, 1)
					go func() { done <- call() }()
					select {
					case <-lost.waiting:
						ended[name] = done
					case <-done:
					}
				}
			}
			address := addressOf(lost.url)
			for m.lost(address) == nil {
				m.check(cluster)
			}
			for name, done := range ended {
				if err := <-done; name == "read" && err != nil || name != "read" && status.Code(err) != codes.Unavailable {
					t.Errorf("a %s at the lost member: %v", name, err)
				}
			}
			for range 30 {
				for _, name := range []string{"read", "write"} {
					if err := calls[name](); err != nil {
						t.Errorf("a %s after the loss: %v", name, err)
					}
				}
			}
			if n := len(lost.waiting); n > 0 {
				t.Errorf("the lost member receives %d requests", n)
			}
			if _, err := m.dialer(nil)(t.Context(), "tcp", address); err == nil {
				t.Error("clients may connect to the lost member")
			}
			lost.leaderless.Store(false)
			lost.frozen.Store(false)
			if m.check(cluster); m.lost(address) != nil {
				t.Errorf("a good check: %v", m.lost(address))
			}
		})
	}
}

// A slow member is not lost as soon as a member without a leader, and not at all if all members are slow: this process
// may be slow.
func TestChecksUntilAMemberIsLost(t *testing.T) {
	unresponsive := result{fmt.Errorf("%w: DeadlineExceeded", errUnresponsive), memberCheckTimeout}
	for name, test := range map[string]struct {
		other, lost result
		want        int
	}{
		"no leader":             {result{}, result{err: errNoLeader}, lostAfter},
		"no connection":         {result{}, result{err: errors.New("connection refused")}, lostAfter},
		"unresponsive":          {result{}, unresponsive, unresponsiveAfter},
		"no leader, all slow":   {result{took: 2 * promptCheck}, result{err: errNoLeader}, lostAfter},
		"unresponsive, or slow": {result{took: 2 * promptCheck}, unresponsive, 0},
	} {
		m := newMembers()
		cluster, err := m.open([]string{"http://localhost:1", "http://localhost:2"}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		checks := 0
		for n := 1; n < 10 && checks == 0; n++ {
			if m.record(cluster, []result{test.other, test.lost}); m.lost("localhost:2") != nil {
				checks = n
			}
		}
		if checks != test.want {
			t.Errorf("%s: lost after %d checks, not %d", name, checks, test.want)
		}
		_ = closeAll(cluster)
	}
}

// While no member has a leader, the cluster elects a leader, and requests wait at their members.
func TestAnElectionLosesNoMember(t *testing.T) {
	fakes, servers := startMembers(t, 3)
	m, cluster, _ := openMembers(t, servers)
	for _, f := range fakes {
		f.leaderless.Store(true)
	}
	for range 2 * lostAfter {
		m.check(cluster)
	}
	for _, member := range cluster {
		if member.failures > 0 {
			t.Errorf("%s: %d failures", member.address, member.failures)
		}
	}
}

// gRPC dials sockets and single servers itself.
func TestClustersOfServers(t *testing.T) {
	for _, test := range []struct {
		servers []string
		want    bool
	}{
		{[]string{"https://a:1"}, false},
		{[]string{"https://a:1", "https://b:1"}, true},
		{[]string{"a:1", "b:1"}, true},
		{[]string{"unix:///a", "unix:///b"}, false},
		{[]string{"https://a:1", "unixs:///b"}, false},
	} {
		if got := isCluster(test.servers); got != test.want {
			t.Errorf("%v: %v", test.servers, got)
		}
	}
	for server, want := range map[string]string{"https://a:1": "a:1", "http://[::1]:2": "[::1]:2",
		"10.0.0.1:1": "10.0.0.1:1",
		"a:1":        "a:1"} {
		if got := addressOf(server); got != want {
			t.Errorf("%s: %s, not %s", server, got, want)
		}
	}
}
