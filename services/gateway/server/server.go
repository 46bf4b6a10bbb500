// Package server is the gateway's HTTPS server and its filter chain. It does not route requests. Only package gateway
// imports it.
//
// Goroutines: Run owns the listener. net/http and golang.org/x/net/http2 own a goroutine per connection and request.
// withTimeout runs each handler with a time limit on a goroutine of its workerPool.
package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"

	"k8s.io/apimachinery/pkg/util/waitgroup"

	"watershed.dev/services/gateway/turns"
)

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
