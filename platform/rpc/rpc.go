package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
)

// MaxMessageBytes bounds one message: an object may be 3 MB in a request and is sent with the object it replaces.
const MaxMessageBytes = 64 << 20

// TLS names the files of a service's identity on the inner network and of the CA that signs all of them.
type TLS struct {
	CertFile, KeyFile, CAFile string
}

// AddFlags adds the flags of a service's inner identity.
func (t *TLS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.CertFile, "rpc-cert-file", t.CertFile, "This service's certificate on the inner network; its common name is the service's name.")
	fs.StringVar(&t.KeyFile, "rpc-key-file", t.KeyFile, "The key of --rpc-cert-file.")
	fs.StringVar(&t.CAFile, "rpc-ca-file", t.CAFile, "The CA that signs every service's inner certificate. Not the cluster's client CA.")
}

// Config loads the files. The certificate is read again whenever it has changed on disk.
func (t TLS) Config() (*tls.Config, error) {
	for flag, v := range map[string]string{"rpc-cert-file": t.CertFile, "rpc-key-file": t.KeyFile, "rpc-ca-file": t.CAFile} {
		if v == "" {
			return nil, fmt.Errorf("--%s is required: services speak mutual TLS to each other", flag)
		}
	}
	pem, err := os.ReadFile(t.CAFile)
	if err != nil {
		return nil, fmt.Errorf("--rpc-ca-file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--rpc-ca-file %q holds no PEM certificate", t.CAFile)
	}
	if _, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile); err != nil {
		return nil, fmt.Errorf("--rpc-cert-file %q with --rpc-key-file %q: %w", t.CertFile, t.KeyFile, err)
	}
	load := t.loader()
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return load() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() },
	}, nil
}

func (t TLS) loader() func() (*tls.Certificate, error) {
	var mu sync.Mutex
	var at time.Time
	var cert *tls.Certificate
	return func() (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		info, err := os.Stat(t.CertFile)
		if err == nil && (cert == nil || info.ModTime().After(at)) {
			var c tls.Certificate
			if c, err = tls.LoadX509KeyPair(t.CertFile, t.KeyFile); err == nil {
				cert, at = &c, info.ModTime()
			}
		}
		if cert == nil {
			return nil, err
		}
		return cert, nil
	}
}

var handled = prometheus.NewHistogramVec(prometheus.HistogramOpts{
	Name: "watershed_rpc_duration_seconds", Help: "Duration of RPCs served, by method and code. Streams count to their end.",
	Buckets: prometheus.ExponentialBuckets(0.00025, 4, 9),
}, []string{"method", "code"})

// Metrics are this package's collectors, for a service's registry.
func Metrics() []prometheus.Collector { return []prometheus.Collector{handled} }

// Server is one service's gRPC endpoint.
type Server struct {
	*grpc.Server
	health *health.Server
}

// NewServer returns a server that accepts only the named clients (the common names of their certificates), reports
// health, traces, counts, turns panics into errors and API errors into statuses.
func NewServer(id TLS, clients ...string) (*Server, error) {
	conf, err := id.Config()
	if err != nil {
		return nil, err
	}
	s := &Server{health: health.NewServer()}
	s.Server = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(conf)),
		grpc.StatsHandler(otelgrpc.NewServerHandler()),
		grpc.MaxRecvMsgSize(MaxMessageBytes), grpc.MaxSendMsgSize(MaxMessageBytes),
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (resp any, err error) {
			defer observe(info.FullMethod, time.Now(), &err)
			defer recovered(info.FullMethod, &err)
			if err := allowed(ctx, info.FullMethod, clients); err != nil {
				return nil, err
			}
			resp, err = h(ctx, req)
			return resp, ToStatus(err)
		}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) (err error) {
			defer observe(info.FullMethod, time.Now(), &err)
			defer recovered(info.FullMethod, &err)
			if err := allowed(ss.Context(), info.FullMethod, clients); err != nil {
				return err
			}
			return ToStatus(h(srv, ss))
		}),
	)
	healthv1.RegisterHealthServer(s.Server, s.health)
	s.health.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

func observe(method string, since time.Time, err *error) {
	handled.WithLabelValues(method, status.Code(*err).String()).Observe(time.Since(since).Seconds())
}

func allowed(ctx context.Context, method string, clients []string) error {
	if strings.HasPrefix(method, "/grpc.health.") {
		return nil
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return status.Error(codes.Unauthenticated, "no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return status.Error(codes.Unauthenticated, "no client certificate")
	}
	if name := info.State.PeerCertificates[0].Subject.CommonName; !slices.Contains(clients, name) {
		return status.Errorf(codes.PermissionDenied, "service %q may not call %s", name, method)
	}
	return nil
}

// SetReady tells health checks, and so every caller's balancer, whether to send requests here.
func (s *Server) SetReady(ready bool) {
	st := healthv1.HealthCheckResponse_NOT_SERVING
	if ready {
		st = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", st)
}

// Serve listens on addr until ctx is done, then drains: health turns first, calls in flight get up to drain to end.
func (s *Server) Serve(ctx context.Context, addr string, drain time.Duration) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("--rpc-address %q: %w", addr, err)
	}
	slog.Info("Serving RPCs", "address", l.Addr().String())
	ended := make(chan error, 1)
	go func() { ended <- s.Server.Serve(l) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.SetReady(false)
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(drain):
		s.Stop()
	}
	return nil
}

const serviceConfig = `{"loadBalancingConfig":[{%q:{}}],"healthCheckConfig":{"serviceName":""}%s}`

// retry sends a call again, on another replica where there is one, when a replica was lost before it answered.
const retry = `,"methodConfig":[{"name":[{}],"waitForReady":true,"retryPolicy":{"maxAttempts":5,"initialBackoff":"0.02s","maxBackoff":"0.5s","backoffMultiplier":3,"retryableStatusCodes":["UNAVAILABLE"]}}]`

// wait only waits for a connection; a call that may have had an effect is never sent twice.
const wait = `,"methodConfig":[{"name":[{}],"waitForReady":true}]`

// Policy is how a service's replicas share its calls.
type Policy struct {
	// Idempotent: a call whose replica dies is sent again, to another.
	Idempotent bool
	// Sharded: a Routed call goes to the replicas of its key. Without it they take turns.
	Sharded bool
}

// Dial connects to every address of one service. Close the connection to end it.
func Dial(id TLS, addresses []string, serverName string, p Policy) (*grpc.ClientConn, error) {
	if len(addresses) == 0 {
		return nil, errors.New("no address for service " + serverName)
	}
	conf, err := id.Config()
	if err != nil {
		return nil, err
	}
	conf.ServerName = serverName
	r := manual.NewBuilderWithScheme("replicas")
	var endpoints []resolver.Address
	for _, a := range addresses {
		endpoints = append(endpoints, resolver.Address{Addr: a})
	}
	r.InitialState(resolver.State{Addresses: endpoints})
	calls, balancer := wait, "round_robin"
	if p.Idempotent {
		calls = retry
	}
	if p.Sharded {
		balancer = rendezvousName
	}
	return grpc.NewClient(r.Scheme()+":///"+serverName,
		grpc.WithResolvers(r),
		grpc.WithTransportCredentials(credentials.NewTLS(conf)),
		grpc.WithDefaultServiceConfig(fmt.Sprintf(serviceConfig, balancer, calls)),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		grpc.WithInitialWindowSize(1<<20), grpc.WithInitialConnWindowSize(4<<20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffConfig, MinConnectTimeout: 2 * time.Second}),
	)
}

// Recover logs a panic of a background goroutine and lets the process live. Use it with defer.
func Recover(what string) {
	if r := recover(); r != nil {
		slog.Error("A background task panicked", "task", what, "panic", r, "stack", string(debug.Stack()))
	}
}
