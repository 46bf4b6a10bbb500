package rpc

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	registryv1 "watershed.dev/proto/watershed/registry/v1"

	"watershed.dev/platform/pki"
)

// discoveryServer sends a single message on each stream.
type discoveryServer struct {
	registryv1.UnimplementedDiscoveryServer
}

func (discoveryServer) Watch(_ *registryv1.DiscoveryRequest,
	stream grpc.ServerStreamingServer[registryv1.DiscoveryResponse]) error {
	if err := stream.Send(&registryv1.DiscoveryResponse{}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// A draining server ends the streams of EndOnDrain at once. It does not wait for their clients.
func TestDrainEndsStreams(t *testing.T) {
	ca := newCA(t)
	server, err := NewServer(map[string]TLS{"registry": identityOf(t, ca, "registry", pki.Server)})
	if err != nil {
		t.Fatal(err)
	}
	registryv1.RegisterDiscoveryServer(server, discoveryServer{})
	server.SetReady("registry", true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- server.serve(ctx, l, time.Hour) }()

	conn, err := Dial(identityOf(t, ca, "gateway", pki.Client), "registry", Addresses{l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := registryv1.NewDiscoveryClient(conn).Watch(t.Context(), &registryv1.DiscoveryRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable || status.Convert(err).Message() !=
		status.Convert(ErrDraining).Message() {
		t.Errorf("the stream ends with %v", err)
	}
	select {
	case err := <-served:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("the server waits for its clients")
	}
}

// EndOnDrain lists only methods that exist.
func TestEndOnDrainMethodsExist(t *testing.T) {
	for _, m := range EndOnDrain {
		if len(AllowedClients[m]) == 0 {
			t.Errorf("there is no %s", m)
		}
	}
}
