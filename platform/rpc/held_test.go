package rpc

import (
	"context"
	"net"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// holding is a registry whose response to ReadLog is a large chunk. Its call ends at once.
type holding struct {
	registryv1.UnimplementedSourceServer
	released chan struct{}
}

func (s *holding) ReadLog(_ *logv1.ReadRequest, stream grpc.ServerStreamingServer[logv1.Chunk]) error {
	m := &logv1.Chunk{Messages: []*logv1.StoredMessage{{Data: make([]byte, 1<<20)}}}
	return stream.SendMsg(Hold(m, func() { s.released <- struct{}{} }))
}

// A held message is released when it is received, when its call is canceled, and when its connection breaks. It is
// still held after its call has ended, because gRPC has it until the client reads it.
func TestAHeldMessageIsReleased(t *testing.T) {
	s := &holding{released: make(chan struct{}, 10)}
	l := bufconn.Listen(1 << 10)
	server := grpc.NewServer(grpc.ForceServerCodecV2(wireCodec))
	registryv1.RegisterSourceServer(server, s)
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	dial := func() *grpc.ClientConn {
		conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }),
			grpc.WithInitialWindowSize(64<<10))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	inside := NewInProcess(false)
	registryv1.RegisterSourceServer(inside, s)
	call := func(conn grpc.ClientConnInterface) (grpc.ServerStreamingClient[logv1.Chunk], context.CancelFunc) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := registryv1.NewSourceClient(conn).ReadLog(ctx, &logv1.ReadRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return stream, cancel
	}
	released := func(how string) {
		t.Helper()
		for until := time.Now().Add(2 * time.Minute); time.Now().Before(until); runtime.GC() {
			select {
			case <-s.released:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
		t.Fatal("a message is not released that is ", how)
	}
	held := func() {
		t.Helper()
		time.Sleep(50 * time.Millisecond) // an absent event cannot be awaited
		runtime.GC()
		runtime.GC()
		select {
		case <-s.released:
			t.Error("a message that no client has received is released")
		case <-time.After(50 * time.Millisecond):
		}
	}
	for name, conn := range map[string]grpc.ClientConnInterface{
		"gRPC":       dial(),
		"in process": inside.Client("watchfanout"),
	} {
		stream, cancel := call(conn)
		if m, err := stream.Recv(); err != nil || len(m.Messages) != 1 || len(m.Messages[0].Data) != 1<<20 {
			t.Fatalf("%s: %v, %v", name, len(m.GetMessages()), err)
		}
		released("received")
		cancel()
	}
	conn := dial()
	_, cancel := call(conn)
	held()
	cancel()
	released("canceled")
	_, cancel = call(conn)
	defer cancel()
	held()
	conn.Close()
	released("lost with its connection")
	if n := len(s.released); n > 0 {
		t.Errorf("messages are released %d times more", n)
	}
}
