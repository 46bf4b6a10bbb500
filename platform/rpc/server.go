package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

// MaxMessageBytes bounds one message. An object may have 3 MB, and a request may contain it together with the object
// that it replaces.
const MaxMessageBytes = 64 << 20

// Server is the gRPC server of the services of a process. Clients' balancers send calls to a service only while its
// health status is SERVING.
//
//	NOT_SERVING <--SetReady--> SERVING
//	     |                        |
//	     +-----Serve's ctx ends---+--> draining --calls have ended, or the drain timeout--> stopped
//
// A draining server is NOT_SERVING. It ends the streams in EndOnDrain and waits for other calls.
type Server struct {
	*grpc.Server
	health *health.Server
	// draining is canceled with ErrDraining when the server drains.
	draining context.Context
	drain    context.CancelCauseFunc
}

// streamWorkers is the number of goroutines per processor that serve calls one after another, so that their stacks
// have already grown. lastingCalls is the number of further goroutines, because a long call occupies its goroutine. A
// registry has 26 long calls. Calls beyond these numbers get new goroutines.
const (
	streamWorkers = 8
	lastingCalls  = 32
)

// NewServer returns a server of the services in ids, which holds their identities. Only the services in AllowedClients
// may call its methods. It serves health checks, creates spans, records durations, and converts panics and API errors
// to statuses.
func NewServer(ids map[string]TLS) (*Server, error) {
	conf, err := serverConfig(ids)
	if err != nil {
		return nil, err
	}
	s := &Server{health: health.NewServer()}
	s.draining, s.drain = context.WithCancelCause(context.Background())
	options := append(tracingServerOptions(),
		grpc.Creds(socketCredentials{credentials.NewTLS(conf)}),
		grpc.ForceServerCodecV2(wireCodec),
		grpc.NumStreamWorkers(uint32(lastingCalls+streamWorkers*runtime.GOMAXPROCS(0))),
		grpc.MaxRecvMsgSize(MaxMessageBytes), grpc.MaxSendMsgSize(MaxMessageBytes),
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             5 * time.Second,
			PermitWithoutStream: true,
		}),
		grpc.UnaryInterceptor(unaryInterceptor),
		grpc.ChainStreamInterceptor(streamInterceptor, s.endOnDrain),
	)
	s.Server = grpc.NewServer(options...)
	healthv1.RegisterHealthServer(s.Server, s.health)
	for service := range ids {
		s.SetReady(service, false)
	}
	return s, nil
}

// SetReady sets the health status of a service. Clients' balancers send calls only to ready replicas.
func (s *Server) SetReady(service string, ready bool) {
	st := healthv1.HealthCheckResponse_NOT_SERVING
	if ready {
		st = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, st)
}

// LameDuckPeriod is how long a stopping watchfanout still serves its watches. Its health status is already
// NOT_SERVING, so clients start the watches at other replicas before watchfanout ends them.
const LameDuckPeriod = 2 * time.Second

// Serve listens on addr (see Listen) until ctx is done, and then drains. It sets the health status to NOT_SERVING,
// ends the streams in EndOnDrain, and waits up to drain for other calls in flight.
func (s *Server) Serve(ctx context.Context, addr string, drain time.Duration) error {
	l, err := Listen(addr)
	if err != nil {
		return fmt.Errorf("--rpc-address %q: %w", addr, err)
	}
	slog.Info("Serving RPCs", "address", l.Addr().String())
	return s.serve(ctx, l, drain)
}

// serve is Serve with an open listener.
func (s *Server) serve(ctx context.Context, l net.Listener, drain time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- s.Server.Serve(l) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.health.Shutdown() // later calls of SetReady have no effect
	s.drain(ErrDraining)
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(drain):
		s.Stop()
	}
	return nil
}
