package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"log"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/endpoints/metrics"

	"watershed.dev/services/gateway/h2writer"
)

// defaultMaxStreams is kube-apiserver's default. Clients of golang.org/x/net/http2 assume it before they have the
// server's settings. A connection is closed when four times as many of its requests have not started, so this also
// limits rapid resets (k8s.io/apiserver/pkg/server/secure_serving.go).
const defaultMaxStreams = 100

// resourceBody99Percentile is the size that 99 of 100 objects do not exceed. It is the size of a frame and of a
// stream's window (k8s.io/apiserver/pkg/server/secure_serving.go).
const resourceBody99Percentile = 256 << 10

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
