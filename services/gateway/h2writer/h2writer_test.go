package h2writer

import (
	"bufio"
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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"watershed.dev/services/gateway/turns"
)

// serve serves h over Conns.
func serve(t *testing.T, h http.Handler) *httptest.Server {
	return serveAs(t, h, func(*httptest.Server) {}, func(*Conn) {})
}

// serveAs is serve with hooks that change the server and its Conns before use.
func serveAs(t *testing.T, h http.Handler, server func(*httptest.Server), conn func(*Conn)) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(s.Config, h2); err != nil {
		t.Fatal(err)
	}
	s.Config.TLSNextProto["h2"] = func(srv *http.Server, tlsConn *tls.Conn, _ http.Handler) {
		c := NewConn(tlsConn, time.Second, 100)
		conn(c)
		h2.ServeConn(c, &http2.ServeConnOpts{
			Context:    c.WithConn(context.Background()),
			BaseConfig: srv,
			Handler:    Handler(h),
		})
	}
	s.TLS = &tls.Config{NextProtos: []string{"h2"}}
	server(s)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func client(s *httptest.Server) *http.Client {
	tr := &http.Transport{
		TLSClientConfig:   s.Client().Transport.(*http.Transport).TLSClientConfig,
		ForceAttemptHTTP2: true,
	}
	return &http.Client{Transport: tr}
}

func open(t *testing.T, c *http.Client, url string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if resp.ProtoMajor != 2 {
		t.Fatalf("it is %s", resp.Proto)
	}
	return resp
}

// hijackHandler passes each hijacked stream to use and finishes it when end is closed.
func hijackHandler(use func(*Stream), end chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/watch" {
			body := bytes.Repeat([]byte(req.URL.Path), 40000)
			_, _ = w.Write(body)
			return
		}
		fmt.Fprint(w, "head\n")
		w.(http.Flusher).Flush()
		s := StreamFrom(req)
		if s == nil || !s.Hijack(req.Context(), 5) {
			fmt.Fprint(w, "not taken\n")
			return
		}
		use(s)
		select {
		case <-end:
		case <-req.Context().Done():
		}
		_ = s.Finish(req.Context())
	}
}

// A single goroutine writes fifty streams while other requests continue on the same connection.
func TestHijackedStreamsShareConnection(t *testing.T) {
	hijacked, end := make(chan *Stream, 50), make(chan struct{})
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	c := client(srv)
	const streams, events = 50, 400
	pad := strings.Repeat("x", 1200)
	var readers, others sync.WaitGroup
	for range streams {
		resp := open(t, c, srv.URL+"/watch")
		readers.Go(func() {
			lines := bufio.NewReader(resp.Body)
			if l, _ := lines.ReadString('\n'); l != "head\n" {
				t.Errorf("the first line is %q", l)
			}
			for n := range events {
				if l, err := lines.ReadString('\n'); l != fmt.Sprintf("%d%s\n", n, pad) {
					t.Errorf("line %d is %.20q (%v)", n, l, err)
					return
				}
			}
			if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
				t.Errorf("at the end: %.20q, %v", rest, err)
			}
		})
	}
	var all []*Stream
	for range streams {
		all = append(all, <-hijacked)
	}
	stop := make(chan struct{})
	for n := range 4 {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				path := fmt.Sprintf("/other%d", n)
				resp, err := c.Get(srv.URL + path)
				if err != nil {
					t.Error(err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || !bytes.Equal(body, bytes.Repeat([]byte(path), 40000)) {
					t.Errorf("%d bytes, %v", len(body), err)
					return
				}
			}
		})
	}
	for n := range events {
		line := []byte(fmt.Sprintf("%d%s\n", n, pad))
		for _, s := range all {
			if hijacked, _ := s.TryWrite(line); !hijacked {
				if err := s.Write(t.Context(), 10*time.Second, line); err != nil {
					t.Fatal(err)
				}
			}
		}
		all[0].Flush()
	}
	close(end)
	readers.Wait()
	close(stop)
	others.Wait()
}

// If a client does not read a stream, its other streams continue. The unread data waits only in that stream's window.
func TestSlowStreamDoesNotBlockOthers(t *testing.T) {
	hijacked, end := make(chan *Stream, 2), make(chan struct{})
	defer close(end)
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	c := client(srv)
	open(t, c, srv.URL+"/watch") // this stream is not read
	slow := <-hijacked
	quick := open(t, c, srv.URL+"/watch")
	s := <-hijacked
	var got atomic.Int64
	go func() {
		n, _ := io.Copy(io.Discard, quick.Body)
		got.Store(n)
	}()
	chunk := bytes.Repeat([]byte("y"), 10000)
	queueFull := false
	for range 2000 { // 20 MB; a Go client accepts 4 MB per stream
		hijacked, _ := slow.TryWrite(chunk)
		if !queueFull && !hijacked {
			queueFull = errors.Is(slow.Write(t.Context(), 50*time.Millisecond, chunk), ErrSlowClient)
		}
		if err := s.Write(t.Context(), 10*time.Second, chunk); err != nil {
			t.Fatal(err)
		}
		s.Flush()
	}
	if !queueFull {
		t.Error("the slow stream accepted everything")
	}
}

// A response has no turn while its client's window is full.
func TestAFullWindowEndsTheTurn(t *testing.T) {
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	defer close(end)
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	open(t, client(srv), srv.URL+"/watch") // its body is not read
	s, all := <-hijacked, turns.New(1, time.Hour)
	turn, ctx := all.NewTurn(t.Context(), "slow")
	if err := turn.Take(ctx); err != nil {
		t.Fatal(err)
	}
	go func() { _ = s.Write(ctx, 10*time.Second, make([]byte, 20<<20)) }() // a Go client accepts 4 MB
	other, otherCtx := all.NewTurn(t.Context(), "other")
	if err := other.Take(otherCtx); err != nil { // slow's turn would last an hour
		t.Error(err)
	}
}

// Headers of several frames do not delay Hijack until the connection's next frame.
func TestAStreamWithLongHeadersIsHijacked(t *testing.T) {
	hijacked := make(chan bool, 1)
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Long", strings.Repeat("x", 1<<17))
		w.(http.Flusher).Flush()
		hijacked <- StreamFrom(req).Hijack(req.Context(), 0)
	}))
	open(t, client(srv), srv.URL)
	select {
	case ok := <-hijacked:
		if !ok {
			t.Error("not hijacked")
		}
	case <-time.After(2 * time.Minute):
		t.Error("the handler waits for another frame")
	}
}

func TestAClientThatLeavesEndsItsStream(t *testing.T) {
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	defer close(end)
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	resp := open(t, client(srv), srv.URL+"/watch")
	s := <-hijacked
	resp.Body.Close()
	for {
		if err := s.Write(t.Context(), 10*time.Second, []byte("x")); err != nil {
			if !errors.Is(err, errStreamClosed) {
				t.Error(err)
			}
			return
		}
		time.Sleep(time.Millisecond) // between tries, until the client's RST_STREAM has arrived
	}
}

// A peer that reads nothing does not block its handlers for longer than the connection's write timeout. Its connection
// returns its buffers.
func TestDeadPeerClosesConnection(t *testing.T) {
	before, ended := bufferedBytes.Load(), make(chan struct{}, 1)
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer func() { ended <- struct{}{} }()
		w.(http.Flusher).Flush()
		s := StreamFrom(req)
		// the connection's window update comes after the request
		until := time.Now().Add(2 * time.Minute)
		for s != nil && !s.Hijack(req.Context(), 0) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
		}
		if s == nil || time.Now().After(until) {
			t.Error("not taken")
			return
		}
		chunk := bytes.Repeat([]byte("z"), 100000)
		most := before
		for s.Write(req.Context(), time.Minute, chunk) == nil {
			most = max(most, bufferedBytes.Load())
		}
		if most == before {
			t.Error("the buffer of a queue is not counted")
		}
	}))
	conn := dialRaw(t, srv)
	f := openRawStream(t, conn, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30})
	if err := f.WriteWindowUpdate(0, 1<<30); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(2 * time.Minute):
		t.Fatal("its handler still waits")
	}
	srv.Close()
	waitForCount(t, int(before), "bytes of buffers", func() int { return int(bufferedBytes.Load()) })
}

// The server, not the Conn, serves a client with the protocol's own window of 64 KB, which is too small to divide.
func TestASmallWindowIsNotShared(t *testing.T) {
	end := make(chan struct{})
	defer close(end)
	srv := serve(t, hijackHandler(func(*Stream) { t.Error("taken") }, end))
	conn := dialRaw(t, srv)
	f := openRawStream(t, conn)
	var data strings.Builder
	for !strings.Contains(data.String(), "not taken\n") {
		frame, err := f.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := frame.(*http2.DataFrame); ok {
			data.Write(d.Data())
		}
	}
	if data.String() != "head\nnot taken\n" {
		t.Errorf("%q", data.String())
	}
}

// dialRaw returns a connection without a client of HTTP/2.
func dialRaw(t *testing.T, srv *httptest.Server) *tls.Conn {
	conn, err := tls.Dial("tcp", srv.Listener.Addr().String(), &tls.Config{
		InsecureSkipVerify: true,
		NextProtos:         []string{"h2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func openRawStream(t *testing.T, conn net.Conn, settings ...http2.Setting) *http2.Framer {
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(conn, conn)
	if err := errors.Join(f.WriteSettings(settings...), writeRequest(f, 1)); err != nil {
		t.Fatal(err)
	}
	return f
}

// writeRequest writes the headers of a request for /watch.
func writeRequest(f *http2.Framer, id uint32) error {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "x"}, {":path", "/watch"}} {
		// without indexing, because each request has an encoder of its own
		if err := enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1], Sensitive: true}); err != nil {
			return err
		}
	}
	return f.WriteHeaders(http2.HeadersFrameParam{
		StreamID:      id,
		BlockFragment: block.Bytes(),
		EndStream:     true,
		EndHeaders:    true,
	})
}

func TestHandlersDoNotSeeStreamHeader(t *testing.T) {
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for name := range req.Header {
			if strings.HasPrefix(name, "X-Stream-") {
				t.Errorf("a handler sees %s", name)
			}
		}
		if StreamFrom(req) == nil {
			t.Error("no stream")
		}
	}))
	c := client(srv)
	for range 3 {
		open(t, c, srv.URL+"/")
	}
}
