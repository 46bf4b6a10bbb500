package telemetry

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// Spans go to their collector by the dialer of the egress network, or directly.
func TestSpansUseTheDialer(t *testing.T) {
	t.Cleanup(func() {
		current = disabled
		otel.SetTracerProvider(noop.NewTracerProvider())
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var exported, dialed atomic.Int32
	collector := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(stream); strings.HasSuffix(method, "TraceService/Export") {
			exported.Add(1)
		}
		if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		return stream.SendMsg(&emptypb.Empty{})
	}))
	go func() { _ = collector.Serve(l) }()
	t.Cleanup(collector.Stop)
	const unreachable = "127.0.0.1:1"
	proxied := func(ctx context.Context, network, address string) (net.Conn, error) {
		if network != "tcp" || address != unreachable {
			t.Errorf("dialed %s %s", network, address)
		}
		dialed.Add(1)
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	}
	export := func(o Tracing) {
		t.Helper()
		exported.Store(0)
		stop, err := o.start(t.Context(), "t")
		if err != nil {
			t.Fatal(err)
		}
		_, span := RequestTracerProvider().Tracer("t").Start(t.Context(), "GET")
		span.End()
		if stop(); exported.Load() != 1 {
			t.Errorf("%d exports", exported.Load())
		}
	}
	export(Tracing{Endpoint: unreachable, Dialer: func() (utilnet.DialFunc, error) { return proxied, nil }})
	if dialed.Load() != 1 {
		t.Errorf("dialed %d times", dialed.Load())
	}
	export(Tracing{Endpoint: l.Addr().String(), Dialer: func() (utilnet.DialFunc, error) { return nil, nil }})
	export(Tracing{Endpoint: l.Addr().String()})
	unreadable := errors.New("--egress-selector-config-file")
	failing := Tracing{Endpoint: unreachable, Dialer: func() (utilnet.DialFunc, error) { return nil, unreadable }}
	if _, err := failing.start(t.Context(), "t"); !errors.Is(err, unreadable) {
		t.Errorf("an unreadable file: %v", err)
	}
}
