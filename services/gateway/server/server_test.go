package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"watershed.dev/platform/porttest"
)

// serve starts the gateway's own server over a handler, with a test certificate.
func serve(t *testing.T, c *Config, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.Config = c.server(h, nil)
	l := newUserLimits(&c.UserLimits)
	l.trackConnections(s.Config)
	s.EnableHTTP2 = true
	if err := serveHTTP2(s.Config, defaultMaxStreams, l.connContext); err != nil {
		t.Fatal(err)
	}
	s.TLS = s.Config.TLSConfig
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// preface opens an HTTP/2 connection and sends the client's preface, with its settings.
func preface(t *testing.T, s *httptest.Server, settings ...http2.Setting) (net.Conn, *http2.Framer) {
	t.Helper()
	conn, err := tls.Dial("tcp", s.Listener.Addr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http2.NextProtoTLS}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(conn, conn)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteSettings(settings...); err != nil {
		t.Fatal(err)
	}
	return conn, f
}

// getHeaders returns the header block of a GET request for /.
func getHeaders() []byte {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range []hpack.HeaderField{
		{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "https"},
		{Name: ":authority", Value: "localhost"}, {Name: ":path", Value: "/"},
	} {
		_ = enc.WriteField(h)
	}
	return block.Bytes()
}

func defaults(t *testing.T, args ...string) *Config {
	t.Helper()
	c := &Config{}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return c
}

// A connection has kube-apiserver's settings (its secure_serving.go).
func TestAConnectionHasKubeAPIServersSettings(t *testing.T) {
	const body = 256 << 10
	for flag, streams := range map[string]uint32{
		"":                                       100,
		"--http2-max-streams-per-connection=0":   100,
		"--http2-max-streams-per-connection=300": 300,
	} {
		_, f := preface(t, serve(t, defaults(t, strings.Fields(flag)...), http.NotFoundHandler()))
		got, window := map[http2.SettingID]uint32{}, uint32(65535) // RFC 9113, 6.9.2
		for len(got) == 0 || window == 65535 {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				_ = frame.ForeachSetting(func(s http2.Setting) error { got[s.ID] = s.Val; return nil })
			case *http2.WindowUpdateFrame:
				window += frame.Increment
			}
		}
		for id, want := range map[http2.SettingID]uint32{
			http2.SettingMaxConcurrentStreams: streams,
			http2.SettingMaxFrameSize:         body,
			http2.SettingInitialWindowSize:    body,
		} {
			if got[id] != want {
				t.Errorf("%q: %v is %d, want %d", flag, id, got[id], want)
			}
		}
		if window != streams*body {
			t.Errorf("%q: the connection's window is %d, want %d", flag, window, streams*body)
		}
	}
}

// The server closes the connection of a client that resets each request at once, when 400 handlers have not started.
func TestRapidResetsCloseTheConnection(t *testing.T) {
	done := make(chan struct{})
	s := serve(t, defaults(t), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-done }))
	t.Cleanup(func() { close(done) }) // before the server is closed
	_, f := preface(t, s)
	go func() { // until the server closes the connection
		for id := uint32(1); id < 10_000; id += 2 {
			if f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: getHeaders(),
				EndHeaders: true, EndStream: true}) != nil || f.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
				return
			}
		}
	}()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			t.Fatalf("no GOAWAY: %v", err)
		}
		if away, ok := frame.(*http2.GoAwayFrame); ok {
			begun, waiting := uint32(100), uint32(4*100+1)
			if away.ErrCode != http2.ErrCodeEnhanceYourCalm || away.LastStreamID > 2*(begun+waiting)+1 {
				t.Errorf("%v after stream %d", away.ErrCode, away.LastStreamID)
			}
			return
		}
	}
}

// Headers of more than 1 MB are rejected. A connection's timeouts are kube-apiserver's.
func TestHeadersAreBounded(t *testing.T) {
	s := serve(t, defaults(t), http.NotFoundHandler())
	if c := s.Config; c.ReadHeaderTimeout != 32*time.Second || c.IdleTimeout != 90*time.Second {
		t.Errorf("headers may take %v, and a connection may be idle for %v", c.ReadHeaderTimeout, c.IdleTimeout)
	}
	for _, x := range []struct {
		bytes int
		code  int
	}{{900 << 10, 404}, {1<<20 + 8<<10, 431}} {
		conn, err := tls.Dial("tcp", s.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		go fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n", strings.Repeat("x", x.bytes))
		status := make([]byte, 12)
		if _, err := io.ReadFull(conn, status); err != nil || string(status) != fmt.Sprintf("HTTP/1.1 %d", x.code) {
			t.Errorf("%d bytes of headers: %q %v, want %d", x.bytes, status, err, x.code)
		}
		conn.Close()
	}
}

// Go's clients open further connections for requests beyond a connection's stream limit.
func TestGosClientsOpenFurtherConnections(t *testing.T) {
	const watches = 250
	s := serve(t, defaults(t), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	client := clientOf(t, s)
	open := make(chan error, watches)
	for range watches {
		go func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL, nil)
			if err == nil {
				var resp *http.Response
				if resp, err = client.Do(req); err == nil {
					t.Cleanup(func() { resp.Body.Close() })
				}
			}
			open <- err
		}()
	}
	for range watches {
		if err := <-open; err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				t.Fatal("further watches wait for the first ones to end")
			}
			t.Fatal(err)
		}
	}
}

// "OPTIONS *" gets 200 from net/http, over HTTP/1.1 and HTTP/2. The filters do not authenticate it.
func TestOptionsOfTheServerSkipTheFilters(t *testing.T) {
	s := serve(t, defaults(t), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "a filter", http.StatusUnauthorized)
	}))
	for major, client := range map[int]*http.Client{
		1: {Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}},
		2: s.Client(),
	} {
		var body io.Reader
		if major == 2 { // a response over HTTP/1.1 waits for the body, also in net/http
			pipe, unsent := io.Pipe()
			defer unsent.Close()
			body = pipe
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, s.URL, body)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Opaque = "*"
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || resp.ProtoMajor != major {
			t.Errorf("HTTP/%d: %s over %s", major, resp.Status, resp.Proto)
		}
	}
}

// Flags outside kube-apiserver's ranges are rejected by a line that names the flag and its value.
func TestFlagsOutOfRangeAreRefused(t *testing.T) {
	for _, flag := range []string{
		"--goaway-chance=0.03", "--goaway-chance=-0.01", "--goaway-chance=NaN", "--request-timeout=-1s",
		"--shutdown-delay-duration=-1s", "--shutdown-watch-termination-grace-period=-1s",
		"--max-connections-per-user=-1", "--max-streams-per-user=-1",
	} {
		err := defaults(t, flag).Validate()
		if err == nil || !strings.HasPrefix(err.Error(), flag+": want ") {
			t.Errorf("%s: %v", flag, err)
		}
	}
	if err := defaults(t, "--goaway-chance=0.02", "--request-timeout=0").Validate(); err != nil {
		t.Error(err)
	}
}

// A pattern of CORS must match the whole hostname (CVE-2022-1996), and a directive of HSTS must be of RFC 6797.
func TestOriginsAndDirectivesAreValidated(t *testing.T) {
	for name, args := range map[string][]string{
		`--cors-allowed-origins "example.com": must match the whole hostname: `:  {"--cors-allowed-origins=example.com"},
		`--cors-allowed-origins "//a": must match the whole hostname: `:          {"--cors-allowed-origins=//a"},
		`--cors-allowed-origins "a\\.com$": must match the whole hostname: `:     {`--cors-allowed-origins=a\.com$`},
		`--cors-allowed-origins "": must match the whole hostname: `:             {`--cors-allowed-origins=//a(:|$),`},
		`--cors-allowed-origins "^(": must be a regular expression: missing clo`: {"--cors-allowed-origins=^("},

		`--strict-transport-security-directives "": must be max-age=SECONDS`: {
			"--strict-transport-security-directives=preload,"},
		`--strict-transport-security-directives "max-age": must be max-age=SECONDS`: {
			"--strict-transport-security-directives=max-age"},
		`--strict-transport-security-directives "max-age=1=2": must be max-age=SECONDS`: {
			"--strict-transport-security-directives=max-age=1=2"},
	} {
		err := defaults(t, args...).Validate()
		if err == nil || !strings.HasPrefix(err.Error(), name) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", args, err)
		}
	}
	err := defaults(t, `--cors-allowed-origins=//a\.com(:|$),^https://b\.com(:|$)`,
		"--strict-transport-security-directives=max-age=31536000,includeSubDomains,preload").Validate()
	if err != nil {
		t.Error(err)
	}
}

// A server of a shared port does not listen before it can serve. It reports unreadable files at once. A server with a
// port of its own listens early, as kube-apiserver does.
func TestASharedPortIsJoinedLate(t *testing.T) {
	for _, shared := range []bool{true, false} {
		port := porttest.FreePort(t)
		c := defaults(t, fmt.Sprintf("--permit-port-sharing=%v", shared), "--bind-address=127.0.0.1",
			fmt.Sprintf("--secure-port=%d", port))
		c.TLS.CertFile, c.TLS.KeyFile = "missing", "missing"
		joinable, listening := make(chan struct{}), make(chan struct{})
		run := func(ctx context.Context) error {
			return NewServer(c).Run(ctx, http.NotFoundHandler(), joinable, func() { close(listening) })
		}
		if err := run(t.Context()); err == nil {
			t.Error("it runs without a certificate")
		}
		c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- run(ctx) }()
		if shared {
			select {
			case <-listening:
				t.Error("it listens before it can serve")
			case <-time.After(100 * time.Millisecond):
			}
			close(joinable)
		}
		select {
		case <-listening:
		case <-time.After(2 * time.Minute):
			t.Fatal("it does not listen")
		}
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	c := defaults(t, "--permit-port-sharing")
	c.TLS.CertFile, c.TLS.KeyFile = leaf(t, authority(t, t.TempDir(), "ca"), "server", "localhost")
	if err := NewServer(c).Run(stopped, nil, nil, func() { t.Error("it listens after the stop") }); err != nil {
		t.Error(err)
	}
}
