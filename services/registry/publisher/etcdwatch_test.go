package publisher

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// watchServer is an etcd that serves watches only, by serve.
type watchServer struct {
	etcdserverpb.UnimplementedWatchServer
	serve func(etcdserverpb.Watch_WatchServer) error
}

func (s *watchServer) Watch(stream etcdserverpb.Watch_WatchServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if err := stream.Send(&etcdserverpb.WatchResponse{Created: true}); err != nil {
		return err
	}
	return s.serve(stream)
}

// watchOf starts a server with serve, and a watch of it.
func watchOf(t *testing.T, serve func(etcdserverpb.Watch_WatchServer) error) *etcdWatch {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	etcdserverpb.RegisterWatchServer(server, &watchServer{serve: serve})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{listener.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	w, err := watchEtcd(t.Context(), client, "/registry/", 1)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// response has events of the revisions.
func response(fragment bool, value string, revisions ...int64) *etcdserverpb.WatchResponse {
	r := &etcdserverpb.WatchResponse{Header: &etcdserverpb.ResponseHeader{Revision: 100}, Fragment: fragment}
	for _, revision := range revisions {
		r.Events = append(r.Events, &mvccpb.Event{Kv: &mvccpb.KeyValue{ModRevision: revision, Value: []byte(value)}})
	}
	return r
}

// Events of a revision come together, although etcd sends them in fragments. A progress notification has none.
func TestFragmentsOfARevisionAreJoined(t *testing.T) {
	w := watchOf(t, func(stream etcdserverpb.Watch_WatchServer) error {
		for _, r := range []*etcdserverpb.WatchResponse{
			response(true, "", 5, 6), response(true, "", 6), response(true, "", 6, 7), response(false, "", 7, 8),
			response(false, ""), {CompactRevision: 7, Canceled: true},
		} {
			if err := stream.Send(r); err != nil {
				return err
			}
		}
		<-stream.Context().Done()
		return nil
	})
	for _, want := range [][]int64{{5}, {6, 6, 6}, {7, 7, 8}, {}} {
		r, ok := <-w.responses
		if !ok || r.err != nil || len(r.events) != len(want) || r.revision != 100 {
			t.Fatalf("%+v, not events of %v", r, want)
		}
		for n, e := range r.events {
			if e.Kv.ModRevision != want[n] {
				t.Errorf("%v, not events of %v", r.events, want)
			}
		}
	}
	if r := <-w.responses; r.err == nil {
		t.Error("the compaction ends the watch without an error")
	}
	if _, ok := <-w.responses; ok {
		t.Error("the watch continues after the compaction")
	}
}

// While the caller takes no response, etcd sends no more than maxUnpublished and the windows of gRPC.
func TestUntakenResponsesWaitInEtcd(t *testing.T) {
	const responses, megabyte = 400, 1 << 20
	var sent atomic.Int64
	w := watchOf(t, func(stream etcdserverpb.Watch_WatchServer) error {
		value := string(make([]byte, megabyte))
		for n := range int64(responses) {
			if err := stream.Send(response(false, value, n+1)); err != nil {
				return err
			}
			sent.Store(n + 1)
		}
		<-stream.Context().Done()
		return nil
	})
	for before := int64(-1); before < maxUnpublished/megabyte || before != sent.Load(); {
		before = sent.Load()
		time.Sleep(300 * time.Millisecond) // etcd waits if it sends nothing in this time
	}
	if n := sent.Load(); n > maxUnpublished/megabyte+40 {
		t.Errorf("etcd has sent %d MB, and none is taken", n)
	}
	for n := range int64(responses) {
		r := <-w.responses
		if r.err != nil || r.events[0].Kv.ModRevision != n+1 {
			t.Fatalf("response %d is %v", n, r.err)
		}
		w.room.Release(r.size)
	}
}
