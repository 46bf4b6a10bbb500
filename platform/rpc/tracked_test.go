package rpc

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// tracking is a watch tier that sends a large frame on each watch, and reports when the transport has released it.
type tracking struct {
	watchfanoutv1.UnimplementedWatchServer
	done chan struct{}
}

func (s *tracking) Watch(_ *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	m := &watchfanoutv1.WatchFrame{Data: make([]byte, 1<<20)}
	if err := stream.SendMsg(&TrackedFrame{WatchFrame: m, Done: func() { s.done <- struct{}{} }}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// Done is called once, between processes and in one: when the frame is received or its stream ends, and not before.
func TestATrackedFrameIsDoneOnce(t *testing.T) {
	s := &tracking{done: make(chan struct{}, 10)}
	l := bufconn.Listen(1 << 10)
	server := grpc.NewServer(grpc.ForceServerCodecV2(wireCodec))
	watchfanoutv1.RegisterWatchServer(server, s)
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec)), grpc.WithInitialWindowSize(64<<10))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	inside := NewInProcess(false)
	watchfanoutv1.RegisterWatchServer(inside, s)
	done := func() {
		t.Helper()
		select {
		case <-s.done:
		case <-time.After(2 * time.Minute):
			t.Fatal("Done is not called")
		}
	}
	for name, conn := range map[string]grpc.ClientConnInterface{"gRPC": conn, "in process": inside.Client("gateway")} {
		client := watchfanoutv1.NewWatchClient(conn)
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := client.Watch(ctx, &watchfanoutv1.WatchRequest{})
		if err != nil {
			t.Fatal(name, err)
		}
		if m, err := stream.Recv(); err != nil || len(m.Data) != 1<<20 {
			t.Fatalf("%s: %d bytes, %v", name, len(m.GetData()), err)
		}
		done()
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := watchfanoutv1.NewWatchClient(conn).Watch(ctx, &watchfanoutv1.WatchRequest{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.done:
		t.Error("a frame that no client has received is done")
	case <-time.After(100 * time.Millisecond): // an absent event cannot be awaited
	}
	cancel()
	done()
	if len(s.done) > 0 {
		t.Error("a frame is done twice")
	}
}
