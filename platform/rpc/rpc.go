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

// MaxMessageBytes bounds one message. An object may have 3 MB, and a request may contain it together with the object
// that it replaces.
const MaxMessageBytes = 64 << 20

// TLS names the files of a service's identity on the inner network, and of the CA that signs all these identities.
type TLS struct {
	CertFile, KeyFile, CAFile string
}

// AddFlags adds the flags of a service's identity on the inner network.
func (t *TLS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.CertFile, "rpc-cert-file", t.CertFile,
		"This service's certificate on the inner network; its common name is the service's name.")
	fs.StringVar(&t.KeyFile, "rpc-key-file", t.KeyFile, "The key of --rpc-cert-file.")
	fs.StringVar(&t.CAFile, "rpc-ca-file", t.CAFile,
		"The CA that signs every service's inner certificate. Not the cluster's client CA.")
}

// files loads the files that a TLS names, and loads a file again when it has changed on disk.
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
			return nil, fmt.Errorf("--%s is required: services use mutual TLS", flag)
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

// ServicePlaceholder stands for the name of a service in the path of a file that each service of a process has.
const ServicePlaceholder = "{service}"

// Of returns the identity of a service: it replaces ServicePlaceholder in the paths.
func (t TLS) Of(service string) TLS {
	path := func(pattern string) string { return strings.ReplaceAll(pattern, ServicePlaceholder, service) }
	return TLS{CertFile: path(t.CertFile), KeyFile: path(t.KeyFile), CAFile: path(t.CAFile)}
}

// ServerConfig returns the configuration of a server that requires client certificates of the inner CA. The server
// loads the files again, also the CA's, when they have changed on disk.
func (t TLS) ServerConfig() (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.own.get() },
		ClientAuth:     tls.RequireAnyClientCert, // VerifyConnection verifies it by the current CA file
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, "", x509.ExtKeyUsageClientAuth)
		},
	}, nil
}

// serverConfig returns the configuration of a server of several services. A client names the service whose certificate
// it expects (SNI).
func serverConfig(ids map[string]TLS) (*tls.Config, error) {
	configs := map[string]*tls.Config{}
	for service, id := range ids {
		conf, err := id.ServerConfig()
		if err != nil {
			return nil, err
		}
		if len(ids) == 1 {
			return conf, nil
		}
		configs[service] = conf
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if conf := configs[hello.ServerName]; conf != nil {
				return conf, nil
			}
			return nil, fmt.Errorf("tls: service %q is not in this process", hello.ServerName)
		},
	}, nil
}

// ClientConfig returns the configuration of a client of the named server. The client loads the files again as a server
// does.
func (t TLS) ClientConfig(server string) (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ServerName:           server,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return f.own.get() },
		InsecureSkipVerify:   true, // VerifyConnection verifies it by the current CA file
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, server, x509.ExtKeyUsageServerAuth)
		},
	}, nil
}

// verify checks a certificate as crypto/tls does with a fixed set of CAs. crypto/tls calls it for resumed connections
// too.
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

// reloadedFile is the content of a file. get loads it again when the modification time has changed. If that fails, get
// returns the previous content.
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
	Help:    "Duration in seconds of RPCs served, by method and code. Streams count to their end.",
	Buckets: prometheus.ExponentialBuckets(0.00025, 4, 9),
}, []string{"method", "code"})

// Metrics returns the collectors that every process has. A process with an xDS client also has XDS.Metrics.
func Metrics() []prometheus.Collector { return []prometheus.Collector{rpcDuration} }

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

// serviceConfig returns gRPC's service config of a service's clients: balancer, health checks and retries. If a replica
// is lost before it responds, gRPC sends the call again, to another ready replica if possible. A call of a method in
// NonIdempotent waits for a connection and is not sent again.
func serviceConfig(of string) string {
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
		"healthCheckConfig":   map[string]any{"serviceName": of},
		"methodConfig":        methods,
	})
	if err != nil { // every value can be encoded
		panic(err)
	}
	return string(data)
}

// Balancer is the name of the balancing policy of all clients. WithHashKey and WithAffinity choose the replicas of a
// call. TrackReplica records the replica that a call was sent to.
const Balancer = "watershed_rendezvous"

// Replicas is the source of the addresses of replicas: Addresses or XDS.
type Replicas interface {
	builder() resolver.Builder
	// AddressesOf returns the current addresses of a service's replicas.
	AddressesOf(service string) []string
}

// Addresses are all replicas of a service, in the form that ParseAddress parses. They do not change.
type Addresses []string

func (a Addresses) builder() resolver.Builder {
	r := manual.NewBuilderWithScheme("replicas")
	r.InitialState(stateOf(a))
	return r
}

// AddressesOf implements Replicas.
func (a Addresses) AddressesOf(string) []string { return a }

// DialReplica returns a connection to the replica of a service at an address, whether or not the replica is ready. Its
// calls fail at once if the replica cannot be reached.
func DialReplica(id TLS, service, address string) (*grpc.ClientConn, error) {
	conf, err := id.ClientConfig(service)
	if err != nil {
		return nil, err
	}
	r := Addresses{address}.builder()
	return grpc.NewClient(r.Scheme()+":///"+service,
		grpc.WithResolvers(r),
		grpc.WithTransportCredentials(socketCredentials{credentials.NewTLS(conf)}),
		grpc.WithUserAgent("watershed/"+version.Release()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec), grpc.MaxCallRecvMsgSize(16<<20)),
	)
}

// Dial returns a connection to all replicas of a service. Their certificates must have the service's name. Close the
// connection to end it.
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
		grpc.WithDefaultServiceConfig(serviceConfig(service)),
		grpc.WithIdleTimeout(0), // an idle connection keeps the balancer's state of replicas
		grpc.WithUserAgent("watershed/"+version.Release()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec), grpc.MaxCallRecvMsgSize(MaxMessageBytes),
			grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		// An unread stream holds at most this window in the client. For a message that the client waits for, gRPC
		// extends the window to its size.
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(4<<20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{ // drops a frozen replica after Time + Timeout
			Time:                10 * time.Second,
			Timeout:             3 * time.Second,
			PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffConfig, MinConnectTimeout: 2 * time.Second}),
	)
	return grpc.NewClient(r.Scheme()+":///"+service, options...)
}
