// Package server is the gateway's HTTPS server and its filter chain. It does not route requests. Only package gateway
// imports it.
//
// Goroutines: Run owns the listener. net/http and golang.org/x/net/http2 own a goroutine per connection and request.
// withTimeout runs each handler with a time limit on a goroutine of its workerPool.
package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/waitgroup"
	"k8s.io/apiserver/pkg/endpoints/metrics"

	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/turns"
)

// Config holds the settings of the server, under kube-apiserver's names.
type Config struct {
	BindAddress                string
	SecurePort                 int
	TLS                        TLSConfig
	ClientCAFile               string
	ServicesCAFile             string
	RequestHeaderCAFile        string
	MaxInFlight, MaxMutating   int
	UserLimits                 UserLimitsConfig
	RequestTimeout             time.Duration
	CORS                       []string
	HSTS                       []string
	GoawayChance               float64
	APIAudiences               []string
	HTTP2MaxStreams            uint32
	PermitPortSharing          bool
	ShutdownDelay              time.Duration
	WatchGracePeriod           time.Duration
	ShutdownSendRetryAfter     bool
	RequestHeaderUserHeaders   []string
	RequestHeaderUIDHeaders    []string
	RequestHeaderGroupHeaders  []string
	RequestHeaderExtraPrefixes []string
}

// AddFlags registers the flags of the HTTPS server and its filters, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.BindAddress, "bind-address", "0.0.0.0",
		"The IP address on which to listen for the --secure-port port.")
	fs.IntVar(&c.SecurePort, "secure-port", 6443,
		"The port on which to serve HTTPS with authentication and authorization.")
	fs.BoolVar(&c.PermitPortSharing, "permit-port-sharing", false,
		"If true, SO_REUSEPORT is used when binding the port, so that more than one gateway can bind the same "+
			"address and port. The gateway then binds the port once it can serve.")
	c.TLS.addFlags(fs)
	fs.StringVar(&c.ClientCAFile, "client-ca-file", "",
		"Any request presenting a client certificate signed by one of the authorities in this file is authenticated "+
			"with its common name.")
	fs.StringVar(&c.ServicesCAFile, "services-client-ca-file", "",
		"CA bundle for the client certificates of authn, authz and admission. authn must have the same bundle.")
	fs.StringVar(&c.RequestHeaderCAFile, "requestheader-client-ca-file", "",
		"Root certificate bundle for front proxies' client certificates.")
	fs.IntVar(&c.MaxInFlight, "max-requests-inflight", 400,
		"This and --max-mutating-requests-inflight are summed to determine the cluster's total concurrency "+
			"limit (which must be positive) if --enable-priority-and-fairness is true. Otherwise, this flag limits "+
			"the maximum number of non-mutating requests in flight of a gateway, or a zero value disables the limit "+
			"completely.")
	fs.IntVar(&c.MaxMutating, "max-mutating-requests-inflight", 200,
		"This and --max-requests-inflight are summed to determine the cluster's total concurrency limit "+
			"(which must be positive) if --enable-priority-and-fairness is true. Otherwise, this flag limits the "+
			"maximum number of mutating requests in flight of a gateway, or a zero value disables the limit "+
			"completely.")
	c.UserLimits.addFlags(fs)
	fs.DurationVar(&c.RequestTimeout, "request-timeout", time.Minute,
		"The time after which a request times out. Watches and other long-running requests have no limit.")
	fs.StringSliceVar(&c.CORS, "cors-allowed-origins", nil,
		"List of allowed origins for CORS, comma separated regular expressions. Write each so that it matches the "+
			"whole hostname, as in '//example\\.com(:|$)'. An expression without '^' or '//', or without '$' or ':', is "+
			"rejected.")
	fs.StringSliceVar(&c.HSTS, "strict-transport-security-directives", nil,
		"List of directives for HSTS, comma separated. Example: 'max-age=31536000,includeSubDomains,preload'.")
	fs.Float64Var(&c.GoawayChance, "goaway-chance", 0,
		"To prevent HTTP/2 clients from getting stuck on a single gateway, randomly close a connection (GOAWAY). "+
			"The probability per request, from 0 to 0.02.")
	fs.StringSliceVar(&c.APIAudiences, "api-audiences", nil, "Identifiers of the API.")
	fs.Uint32Var(&c.HTTP2MaxStreams, "http2-max-streams-per-connection", 0,
		"The limit that the server gives to clients for the maximum number of streams in an HTTP/2 connection. 0: 100.")
	fs.DurationVar(&c.ShutdownDelay, "shutdown-delay-duration", 0,
		"The time after SIGTERM during which the gateway still serves and /readyz fails.")
	fs.DurationVar(&c.WatchGracePeriod, "shutdown-watch-termination-grace-period", 0,
		"The period after --shutdown-delay-duration over which watches are ended, so that their clients do not all "+
			"reconnect at once. 0: all end immediately.")
	fs.BoolVar(&c.ShutdownSendRetryAfter, "shutdown-send-retry-after", false,
		"If true, the gateway listens until all requests in flight have ended. It waits for watches until "+
			"--shutdown-watch-termination-grace-period is over, and for no other long-running requests. During this "+
			"window it rejects requests with status 429, Retry-After and Connection: close.")
	fs.StringSliceVar(&c.RequestHeaderUserHeaders, "requestheader-username-headers", nil,
		"Request headers to inspect for usernames.")
	fs.StringSliceVar(&c.RequestHeaderUIDHeaders, "requestheader-uid-headers", nil,
		"Request headers to inspect for UIDs.")
	fs.StringSliceVar(&c.RequestHeaderGroupHeaders, "requestheader-group-headers", nil,
		"Request headers to inspect for groups.")
	fs.StringSliceVar(&c.RequestHeaderExtraPrefixes, "requestheader-extra-headers-prefix", nil,
		"Request header prefixes to inspect.")
}

// Validate rejects the values that kube-apiserver rejects (k8s.io/apiserver/pkg/server/options,
// ServerRunOptions.Validate), and names the flag.
func (c *Config) Validate() error {
	var errs []error
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"request-timeout", c.RequestTimeout},
		{"shutdown-delay-duration", c.ShutdownDelay},
		{"shutdown-watch-termination-grace-period", c.WatchGracePeriod},
	} {
		if f.value < 0 {
			errs = append(errs, fmt.Errorf("--%s %v: must not be negative", f.name, f.value))
		}
	}
	if net.ParseIP(c.BindAddress) == nil {
		errs = append(errs, fmt.Errorf("--bind-address %q: not an IP address", c.BindAddress))
	}
	if c.SecurePort < 1 || c.SecurePort > 65535 {
		errs = append(errs, fmt.Errorf("--secure-port %d must be between 1 and 65535, inclusive. It cannot be turned "+
			"off with 0", c.SecurePort))
	}
	if !(c.GoawayChance >= 0 && c.GoawayChance <= 0.02) { // also false for NaN
		errs = append(errs, fmt.Errorf("--goaway-chance %v: must be from 0 to 0.02; 0 closes no connection",
			c.GoawayChance))
	}
	for _, pattern := range c.CORS {
		if err := checkOrigin(pattern); err != nil {
			errs = append(errs, fmt.Errorf("--cors-allowed-origins %q: %w", pattern, err))
		}
	}
	for _, directive := range c.HSTS {
		age, found := strings.CutPrefix(directive, "max-age=")
		if directive != "includeSubDomains" && directive != "preload" && (!found || strings.Contains(age, "=")) {
			errs = append(errs, fmt.Errorf("--strict-transport-security-directives %q: must be max-age=SECONDS, "+
				"includeSubDomains or preload", directive))
		}
	}
	return errors.Join(append(errs, c.UserLimits.Validate())...)
}

// checkOrigin returns an error if a pattern of --cors-allowed-origins is not a regular expression, or has no marker of
// the hostname's start ('^', '//') or end ('$', ':'). As in upstream, it does not check the position of the markers, so
// https://example.com passes, and matches other hosts (CVE-2022-1996).
func checkOrigin(pattern string) error {
	var invalid *syntax.Error
	if _, err := regexp.Compile(pattern); errors.As(err, &invalid) {
		return fmt.Errorf("must be a regular expression: %s", invalid.Code)
	}
	pinsStart := strings.Contains(pattern, "^") || strings.Contains(pattern, "//")
	if !pinsStart || !strings.ContainsAny(pattern, "$:") {
		return errors.New("must match the whole hostname: start it with '^' or '//', and end it with '$' or '(:|$)'")
	}
	return nil
}

// FrontProxyHeaders returns the headers that may carry an identity, by name and by prefix. The gateway removes them
// from every request. Upstream's authentication filter also removes X-Remote-User and similar, even if no flag names
// them, because a server behind the gateway may trust them.
func (c *Config) FrontProxyHeaders() (names, prefixes []string) {
	names = slices.Concat(c.RequestHeaderUserHeaders, c.RequestHeaderUIDHeaders, c.RequestHeaderGroupHeaders)
	return names, c.RequestHeaderExtraPrefixes
}

// Server serves HTTPS.
//
//	NewServer ---> waiting ---> listening --- ctx done ---> shutting down ---> draining ---> stopped.
//
// The states:
//
//   - waiting: Run has read its files. Only a server of a shared port waits (--permit-port-sharing).
//   - listening: Run accepts connections.
//   - shutting down: ShuttingDown is closed. The server is not ready and still serves, for --shutdown-delay-duration.
//   - draining: the listener is closed. Clients' watches end in 64 steps over the grace period, and other requests
//     finish. With --shutdown-send-retry-after the listener stays open until requests and watches have ended, and new
//     requests receive 429. The connections then close within retryAfterCloseTimeout.
type Server struct {
	config *Config
	// ShuttingDown is closed when the shutdown starts: the server is not ready and still serves for
	// --shutdown-delay-duration.
	ShuttingDown chan struct{}
	InFlight     *waitgroup.SafeWaitGroup
	// delayOver is closed after --shutdown-delay-duration.
	delayOver chan struct{}
	watches   *openWatches
	// shutdownStagger channels are closed in turn, over the grace period of watches.
	shutdownStagger [64]chan struct{}
	userLimits      *userLimits
	// Handshakes are the turns of TLS handshakes.
	Handshakes *turns.Turns
}

// ShutdownStagger returns a channel that ends a request's watch when the server shuts down. The channel is picked at
// random, so that clients do not all reconnect at once. It is nil for a request from within the process. The process's
// services decide the server's last requests by their watches, and end these when they stop. client-go would open an
// ended watch again at once, at this server.
func (s *Server) ShutdownStagger(ctx context.Context) <-chan struct{} {
	if ctx.Value(loopbackKey{}) != nil {
		return nil
	}
	return s.shutdownStagger[rand.IntN(len(s.shutdownStagger))]
}

// NewServer returns a server that does not listen yet.
func NewServer(c *Config) *Server {
	delayOver := make(chan struct{})
	s := &Server{
		config:       c,
		ShuttingDown: make(chan struct{}),
		delayOver:    delayOver,
		watches:      &openWatches{until: delayOver},
		InFlight:     new(waitgroup.SafeWaitGroup),
		userLimits:   newUserLimits(&c.UserLimits),
		Handshakes:   turns.OfProcessors(),
	}
	for i := range s.shutdownStagger {
		s.shutdownStagger[i] = make(chan struct{})
	}
	return s
}

// defaultMaxStreams is kube-apiserver's default. Clients of golang.org/x/net/http2 assume it before they have the
// server's settings. A connection is closed when four times as many of its requests have not started, so this also
// limits rapid resets (k8s.io/apiserver/pkg/server/secure_serving.go).
const defaultMaxStreams = 100

// resourceBody99Percentile is the size that 99 of 100 objects do not exceed. It is the size of a frame and of a
// stream's window (k8s.io/apiserver/pkg/server/secure_serving.go).
const resourceBody99Percentile = 256 << 10

// Run listens until ctx is done, then waits for the requests in flight. It calls listening once clients can connect. If
// servers share the port, Run does not listen before joinable is closed: the kernel gives each listener a part of the
// connections, although another server is ready.
func (s *Server) Run(ctx context.Context, h http.Handler, joinable <-chan struct{}, listening func()) error {
	c := s.config
	serving, stop := context.WithCancel(context.WithoutCancel(ctx)) // until the last request has ended
	defer stop()
	conf, err := c.TLS.config(serving,
		clientCA{flag: "client-ca-file", file: c.ClientCAFile},
		clientCA{flag: "requestheader-client-ca-file", file: c.RequestHeaderCAFile},
		clientCA{flag: "services-client-ca-file", file: c.ServicesCAFile, services: true})
	if err != nil {
		return err
	}
	conf.GetConfigForClient = s.Handshakes.Handshakes(conf.GetConfigForClient)
	if c.PermitPortSharing {
		select {
		case <-joinable:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return nil
		}
	}
	addr := net.JoinHostPort(c.BindAddress, fmt.Sprint(c.SecurePort))
	l, err := c.listen(ctx, addr)
	if err != nil {
		return fmt.Errorf("--bind-address %s --secure-port %d: %w", c.BindAddress, c.SecurePort, err)
	}
	srv := c.server(h, conf)
	s.userLimits.trackConnections(srv)
	withTurns := func(next connContext) connContext {
		return func(ctx context.Context, c net.Conn) context.Context { return turns.WithConn(next(ctx, c), c) }
	}
	srv.ConnContext = withTurns(srv.ConnContext)
	if c.TLS.DisableHTTP2 {
		srv.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} // else net/http adds HTTP/2
	} else if err := serveHTTP2(srv, srv.HTTP2.MaxConcurrentStreams, withTurns(s.userLimits.connContext)); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.ServeTLS(turns.NewListener(l), "", "") }()
	slog.Info("Serving the Kubernetes API", "address", l.Addr().String())
	listening()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	return s.shutDown(srv)
}

// withOptions responds to "OPTIONS *" without authentication, as net/http does for kube-apiserver. It reads no body,
// because no filter bounds the time of such a request.
func withOptions(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodOptions && req.RequestURI == "*" {
			w.Header().Set("Content-Length", "0")
			return
		}
		h.ServeHTTP(w, req)
	})
}

// server returns net/http's server with kube-apiserver's limits for headers and HTTP/2.
func (c *Config) server(h http.Handler, conf *tls.Config) *http.Server {
	streams := int64(c.HTTP2MaxStreams)
	if streams == 0 {
		streams = defaultMaxStreams
	}
	return &http.Server{
		Handler: h2writer.Handler(withOptions(h)),
		// net/http would wait for the body of "OPTIONS *" without a bound (withOptions).
		DisableGeneralOptionsHandler: true,
		TLSConfig:                    conf,
		MaxHeaderBytes:               1 << 20,
		IdleTimeout:                  90 * time.Second,
		ReadHeaderTimeout:            32 * time.Second,
		ErrorLog:                     discardLogger(),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          int(streams),
			MaxReadFrameSize:              resourceBody99Percentile,
			MaxReceiveBufferPerStream:     resourceBody99Percentile,
			MaxReceiveBufferPerConnection: int(min(streams*resourceBody99Percentile, 1<<30)),
		},
	}
}

// connWriteTimeout is how long a connection's peer may accept no byte before the connection is closed. A stream that
// the client does not read is not affected; its request's deadline ends it (timeoutWriter).
const connWriteTimeout = 30 * time.Second

// connContext returns the context of a connection's requests.
type connContext = func(context.Context, net.Conn) context.Context

// serveHTTP2 serves HTTP/2 over h2writer connections. net/http can serve HTTP/2 only over its own connections, so
// golang.org/x/net/http2 serves it. streams is the server's limit on a connection's streams.
func serveHTTP2(srv *http.Server, streams int, contextOf connContext) error {
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return err
	}
	srv.TLSNextProto[http2.NextProtoTLS] = func(srv *http.Server, conn *tls.Conn, _ http.Handler) {
		h2conn := h2writer.NewConn(conn, connWriteTimeout, streams)
		h2.ServeConn(h2conn, &http2.ServeConnOpts{
			Context:    contextOf(h2conn.WithConn(context.Background()), conn),
			BaseConfig: srv,
			Handler:    srv.Handler,
		})
	}
	return nil
}

// listen opens the port. With --permit-port-sharing, several gateways on a machine share it, and the kernel spreads
// connections over them.
func (c *Config) listen(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{}
	if c.PermitPortSharing {
		lc.Control = func(_, _ string, raw syscall.RawConn) error {
			var serr error
			err := raw.Control(func(fd uintptr) {
				serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			})
			return errors.Join(err, serr)
		}
	}
	return lc.Listen(ctx, "tcp", addr)
}

// discardLogger discards net/http's messages about clients that disconnect. It logs that connections cannot be
// accepted, and counts failed TLS handshakes, as upstream does (k8s.io/apiserver/pkg/server/secure_serving.go).
func discardLogger() *log.Logger { return log.New(handshakeErrors{}, "", 0) }

type handshakeErrors struct{}

// Write implements io.Writer.
func (handshakeErrors) Write(message []byte) (int, error) {
	switch {
	case bytes.Contains(message, []byte("TLS handshake error")):
		metrics.TLSHandshakeErrors.Inc()
	case bytes.Contains(message, []byte("Accept error")): // net/http waits up to 1 s after each
		text := "The gateway cannot accept connections"
		if bytes.Contains(message, []byte(syscall.EMFILE.Error())) {
			text += "; raise the limit of open files (ulimit -n)"
		}
		slog.Error(text, "error", string(bytes.TrimSpace(message)))
	}
	return len(message), nil
}
