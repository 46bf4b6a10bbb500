package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"watershed.dev/platform/version"
)

// MaxMessageBytes bounds one message: an object may be 3 MB in a request and is sent with the object it replaces.
const MaxMessageBytes = 64 << 20

// TLS names the files of a service's identity on the inner network and of the CA that signs all of them.
type TLS struct {
	CertFile, KeyFile, CAFile string
}

// AddFlags adds the flags of a service's inner identity.
func (t *TLS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.CertFile, "rpc-cert-file", t.CertFile,
		"This service's certificate on the inner network; its common name is the service's name.")
	fs.StringVar(&t.KeyFile, "rpc-key-file", t.KeyFile, "The key of --rpc-cert-file.")
	fs.StringVar(&t.CAFile, "rpc-ca-file", t.CAFile,
		"The CA that signs every service's inner certificate. Not the cluster's client CA.")
}

// files are what a TLS names, read again whenever they have changed on disk.
type files struct {
	own         *reloadedFile[*tls.Certificate]
	authorities *reloadedFile[*x509.CertPool]
}

func (t TLS) files() (*files, error) {
	for flag, v := range map[string]string{
		"rpc-cert-file": t.CertFile,
		"rpc-key-file":  t.KeyFile,
		"rpc-ca-file":   t.CAFile,
	} {
		if v == "" {
			return nil, fmt.Errorf("--%s is required: services speak mutual TLS to each other", flag)
		}
	}
	f := &files{
		own: &reloadedFile[*tls.Certificate]{file: t.CertFile, load: func() (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("--rpc-cert-file %q with --rpc-key-file %q: %w", t.CertFile, t.KeyFile, err)
			}
			return &c, nil
		}},
		authorities: &reloadedFile[*x509.CertPool]{file: t.CAFile, load: func() (*x509.CertPool, error) {
			pem, err := os.ReadFile(t.CAFile)
			if err != nil {
				return nil, fmt.Errorf("--rpc-ca-file: %w", err)
			}
			pool := x509.NewCertPool()
			if !pool.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("--rpc-ca-file %q holds no PEM certificate", t.CAFile)
			}
			return pool, nil
		}},
	}
	if _, err := f.own.get(); err != nil {
		return nil, err
	}
	_, err := f.authorities.get()
	return f, err
}

// ServerConfig is for a server: its clients have certificates of the inner CA. The files, the CA's among them, are read
// again whenever they have changed on disk.
func (t TLS) ServerConfig() (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.own.get() },
		ClientAuth:     tls.RequireAnyClientCert, // and verified by the authorities of the day
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, "", x509.ExtKeyUsageClientAuth)
		},
	}, nil
}

// ClientConfig is for a client of the server with a name. The files are read again as a server's are.
func (t TLS) ClientConfig(server string) (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ServerName:           server,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return f.own.get() },
		InsecureSkipVerify:   true, // it is verified below, by the authorities of the day
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, server, x509.ExtKeyUsageServerAuth)
		},
	}, nil
}

// verify is what crypto/tls does for a fixed set of authorities. It is called for resumed connections too.
func (f *files) verify(state tls.ConnectionState, name string, usage x509.ExtKeyUsage) error {
	authorities, err := f.authorities.get()
	if err != nil {
		return err
	}
	if len(state.PeerCertificates) == 0 {
		return errors.New("tls: the peer shows no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots:         authorities,
		Intermediates: intermediates,
		DNSName:       name,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	return err
}

// reloadedFile is what a file holds, read again whenever it has changed. While it cannot be read, what it held before is
// good.
type reloadedFile[T any] struct {
	file string
	load func() (T, error)

	mu      sync.Mutex
	modTime time.Time
	loaded  bool
	value   T
}

func (r *reloadedFile[T]) get() (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := os.Stat(r.file)
	if err == nil && (!r.loaded || !info.ModTime().Equal(r.modTime)) {
		var v T
		if v, err = r.load(); err == nil {
			r.value, r.modTime, r.loaded = v, info.ModTime(), true
		}
	}
	if r.loaded {
		return r.value, nil
	}
	return r.value, err
}

var rpcDuration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
	Name:    "watershed_rpc_duration_seconds",
	Help:    "Duration of RPCs served, by method and code. Streams count to their end.",
	Buckets: prometheus.ExponentialBuckets(0.00025, 4, 9),
}, []string{"method", "code"})

// Metrics are this package's collectors, for a service's registry.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{rpcDuration, xdsUpdates, xdsConnected}
}

// Server is one service's gRPC endpoint.
type Server struct {
	*grpc.Server
	health *health.Server
	// draining ends with ErrDraining when calls in flight are to end.
	draining context.Context
	drain    context.CancelCauseFunc
}

// streamWorkers is how many goroutines for each processor take calls, one after the other, so that their stacks have
// grown to what calls need. lastingCalls is how many more there are, since a call that lasts keeps its goroutine: a
// registry has 26. Calls beyond them have goroutines of their own.
const (
	streamWorkers = 8
	lastingCalls  = 32
)

// NewServer returns a server whose methods only the services named in Callers may call. It reports health, traces,
// counts, turns panics into errors and API errors into statuses.
func NewServer(id TLS) (*Server, error) {
	conf, err := id.ServerConfig()
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
	s.health.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

// SetReady tells health checks, and so every caller's balancer, whether to send requests here.
func (s *Server) SetReady(ready bool) {
	st := healthv1.HealthCheckResponse_NOT_SERVING
	if ready {
		st = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", st)
}

// LameDuckPeriod is how long a watchfanout that is told to stop still serves its watches, so that callers begin them anew
// elsewhere before it ends them: its health has turned.
const LameDuckPeriod = 2 * time.Second

// Serve listens on addr (Listen) until ctx is done, then drains: health turns first, the streams in EndOnDrain end,
// and calls in flight get up to drain to end.
func (s *Server) Serve(ctx context.Context, addr string, drain time.Duration) error {
	l, err := Listen(addr)
	if err != nil {
		return fmt.Errorf("--rpc-address %q: %w", addr, err)
	}
	slog.Info("Serving RPCs", "address", l.Addr().String())
	return s.serve(ctx, l, drain)
}

// serve is Serve on a listener.
func (s *Server) serve(ctx context.Context, l net.Listener, drain time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- s.Server.Serve(l) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.health.Shutdown() // whatever is said of readiness from now on
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

// serviceConfig is how clients call a service (gRPC's service config): by which balancer, and what is sent again. A
// call whose replica is lost before it answers is sent again, to another replica where there is one; of the methods in
// Once it is only waited for a connection.
func serviceConfig() string {
	type name struct {
		Service string `json:"service,omitempty"`
		Method  string `json:"method,omitempty"`
	}
	type method struct {
		Name         []name         `json:"name"`
		WaitForReady bool           `json:"waitForReady"`
		RetryPolicy  map[string]any `json:"retryPolicy,omitempty"`
	}
	methods := []method{{Name: []name{{}}, WaitForReady: true, RetryPolicy: map[string]any{
		"maxAttempts":          5,
		"initialBackoff":       "0.02s",
		"maxBackoff":           "0.5s",
		"backoffMultiplier":    3,
		"retryableStatusCodes": []string{"UNAVAILABLE"},
	}}}
	for _, m := range NonIdempotent {
		service, call, _ := strings.Cut(strings.TrimPrefix(m, "/"), "/")
		methods = append(methods, method{Name: []name{{service, call}}, WaitForReady: true})
	}
	data, err := json.Marshal(map[string]any{
		"loadBalancingConfig": []any{map[string]any{Balancer: struct{}{}}},
		"healthCheckConfig":   map[string]any{"serviceName": ""},
		"methodConfig":        methods,
	})
	if err != nil { // nothing in it can fail
		panic(err)
	}
	return string(data)
}

// Balancer is the name of the policy by which all clients share calls among a service's replicas: Routed and Preferring
// say which replicas, Noting what is known of a call.
const Balancer = "watershed_rendezvous"

// Replicas says where the replicas of services are: Addresses or XDS.
type Replicas interface{ builder() resolver.Builder }

// Addresses are all the replicas of one service, as ParseAddress reads them; they stay what they are.
type Addresses []string

func (a Addresses) builder() resolver.Builder {
	r := manual.NewBuilderWithScheme("replicas")
	r.InitialState(stateOf(a))
	return r
}

// Dial connects to every replica of one service, whose certificates have its name. Close the connection to end it.
func Dial(id TLS, service string, replicas Replicas) (*grpc.ClientConn, error) {
	if a, ok := replicas.(Addresses); ok && len(a) == 0 {
		return nil, errors.New("no address for service " + service)
	}
	conf, err := id.ClientConfig(service)
	if err != nil {
		return nil, err
	}
	r := replicas.builder()
	options := append(TracingDialOptions(),
		grpc.WithChainUnaryInterceptor(trackUnary),
		grpc.WithResolvers(r),
		grpc.WithTransportCredentials(socketCredentials{credentials.NewTLS(conf)}),
		grpc.WithDefaultServiceConfig(serviceConfig()),
		grpc.WithIdleTimeout(0), // what is known of replicas is not forgotten
		grpc.WithUserAgent("watershed/"+version.Release()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec), grpc.MaxCallRecvMsgSize(MaxMessageBytes),
			grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		// A stream that is not received from holds this much of a client; a message that is waited for has a window of
		// its own size.
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(4<<20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{ // a frozen replica is given up after both
			Time:                10 * time.Second,
			Timeout:             3 * time.Second,
			PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffConfig, MinConnectTimeout: 2 * time.Second}),
	)
	return grpc.NewClient(r.Scheme()+":///"+service, options...)
}
