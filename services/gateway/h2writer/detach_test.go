package h2writer

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// detached is a detached response, and its closing and end as a test observes them.
type detached struct {
	*Stream
	closed, ended chan struct{}
}

// detachHandler detaches the stream of each request for /watch, and returns.
func detachHandler(t *testing.T, streams chan<- detached) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/watch" {
			fmt.Fprint(w, req.URL.Path)
			return
		}
		w.(http.Flusher).Flush()
		s := StreamFrom(req)
		until := time.Now().Add(2 * time.Minute) // the connection's window update comes after the request
		for !s.Hijack(req.Context(), 0) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
		}
		d := detached{s, make(chan struct{}, 8), make(chan struct{})}
		if !s.Detach(func() { d.closed <- struct{}{} }) {
			t.Error("not detached")
			return
		}
		defer AtEnd(req, func(any) { close(d.ended) })
		streams <- d
	}
}

func wait(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(2 * time.Minute):
		t.Fatalf("not in time: %s", what)
	}
}

// waitForHandlers waits until all handlers of a connection have returned, except the handler that waits for others.
func waitForHandlers(t *testing.T, d detached) {
	t.Helper()
	waitForCount(t, 1, "handlers that have not returned", func() int {
		d.conn.mu.Lock()
		defer d.conn.mu.Unlock()
		return len(d.conn.unendedByServer)
	})
}

// waitForCount waits until a count is most at the most.
func waitForCount(t *testing.T, most int, what string, count func() int) {
	t.Helper()
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		n := count()
		if n <= most {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("%d %s", n, what)
		}
	}
}

// A response continues after its handler, to the end that its writer chooses.
func TestADetachedResponseOutlastsItsHandler(t *testing.T) {
	streams := make(chan detached, 10)
	srv := serve(t, detachHandler(t, streams))
	c := client(srv)
	var all []detached
	var bodies []*bufio.Reader
	for range 10 {
		bodies = append(bodies, bufio.NewReader(open(t, c, srv.URL+"/watch").Body))
		all = append(all, <-streams)
	}
	waitForHandlers(t, all[0])
	for i, d := range all {
		if err := d.Write(t.Context(), time.Second, fmt.Appendf(nil, "event %d\n", i)); err != nil {
			t.Fatal(err)
		}
	}
	if resp := open(t, c, srv.URL+"/other"); resp.StatusCode != http.StatusOK {
		t.Error(resp.Status)
	}
	for i, d := range all { // the handler of the first waits for the others
		select {
		case <-d.ended:
			t.Error("a response has ended")
		default:
		}
		d.End(nil)
		wait(t, d.ended, "the functions of AtEnd")
		text, err := io.ReadAll(bodies[i])
		if err != nil || string(text) != fmt.Sprintf("event %d\n", i) {
			t.Errorf("%q, %v", text, err)
		}
		if err := d.Write(t.Context(), time.Second, []byte("x")); !errors.Is(err, errStreamClosed) {
			t.Errorf("a write after the end: %v", err)
		}
	}
	conn := all[0].conn
	waitForCount(t, 0, "streams are left", func() int {
		conn.mu.Lock()
		defer conn.mu.Unlock()
		return len(conn.unendedByServer) + len(conn.streams) + conn.detached
	})
	if resp := open(t, c, srv.URL+"/other"); resp.StatusCode != http.StatusOK { // the connection still works
		t.Error(resp.Status)
	}
}

// Clients that close a stream or their connection close the detached responses.
func TestAClientClosesADetachedResponse(t *testing.T) {
	streams := make(chan detached, 10)
	srv := serve(t, detachHandler(t, streams))
	c := client(srv)
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", srv.URL+"/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := <-streams
	open(t, c, srv.URL+"/watch")
	second := <-streams
	leave()
	wait(t, first.closed, "the client has reset its stream")
	first.End(nil)
	wait(t, first.ended, "the end of the first")
	open(t, c, srv.URL+"/watch") // the limits count open streams
	third := <-streams
	srv.CloseClientConnections()
	for _, d := range []detached{second, third} {
		wait(t, d.closed, "the connection is closed")
		d.End(nil)
		wait(t, d.ended, "the end")
	}
}

func TestAPanicResetsADetachedResponse(t *testing.T) {
	streams := make(chan detached, 1)
	srv := serve(t, detachHandler(t, streams))
	resp := open(t, client(srv), srv.URL+"/watch")
	(<-streams).End("a fault of the test")
	if _, err := io.ReadAll(resp.Body); err == nil || !strings.Contains(err.Error(), "INTERNAL_ERROR") {
		t.Errorf("the client sees %v", err)
	}
}

// An idle connection with a detached response stays open, and a graceful shutdown waits for the response.
func TestTheServerWaitsForDetachedResponses(t *testing.T) {
	streams := make(chan detached, 1)
	srv := serveAs(t, detachHandler(t, streams), func(s *httptest.Server) {
		s.Config.IdleTimeout = 50 * time.Millisecond
	}, func(*Conn) {})
	resp := open(t, client(srv), srv.URL+"/watch")
	d := <-streams
	stopped := make(chan error, 1)
	time.AfterFunc(200*time.Millisecond, func() { stopped <- srv.Config.Shutdown(context.WithoutCancel(t.Context())) })
	time.Sleep(1500 * time.Millisecond) // over the idle timeout, and the second before a server closes connections
	if err := d.Write(t.Context(), time.Second, []byte("late\n")); err != nil {
		t.Fatal(err)
	}
	d.End(nil)
	if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "late\n" {
		t.Errorf("%q, %v", text, err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// The limit on streams counts detached responses too, although the server has closed their streams.
func TestDetachedResponsesCountAsStreams(t *testing.T) {
	streams := make(chan detached, 10)
	srv := serveAs(t, detachHandler(t, streams), func(*httptest.Server) {}, func(c *Conn) { c.streamLimit = 3 })
	conn := dialRaw(t, srv)
	f := openRawStream(t, conn)
	if err := f.WriteWindowUpdate(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	all := []detached{<-streams}
	next := uint32(3)
	request := func() {
		t.Helper()
		if err := writeRequest(f, next); err != nil {
			t.Fatal(err)
		}
		next += 2
	}
	for range 2 {
		request()
		all = append(all, <-streams)
	}
	waitForHandlers(t, all[0])
	request()
	refused := func() uint32 {
		t.Helper()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if r, ok := frame.(*http2.RSTStreamFrame); ok && r.ErrCode == http2.ErrCodeRefusedStream {
				return r.StreamID
			}
		}
	}
	if id := refused(); id != 7 {
		t.Errorf("stream %d is refused", id)
	}
	all[0].End(nil)
	wait(t, all[0].ended, "the end")
	request()
	select {
	case <-streams:
	case <-time.After(2 * time.Minute):
		t.Error("a stream is refused although another has ended")
	}
}

// A client that does not read its refused streams loses its connection instead of filling the queue.
func TestRefusedStreamsAreBounded(t *testing.T) {
	certificates := serve(t, http.NotFoundHandler()).TLS.Certificates
	serverSide, clientSide := net.Pipe()
	defer clientSide.Close()
	c := NewConn(tls.Server(serverSide, &tls.Config{Certificates: certificates}), time.Second, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.detached, c.streams[1] = 1, &Stream{conn: c, id: 1}
	for id := uint32(3); c.err == nil; id += 2 {
		c.receivedFrame(frameOf(frameHeaders, flagEndHeaders|flagEndStream, id, nil), frameHeaders,
			flagEndHeaders|flagEndStream, id)
		if len(c.queue) > 2*maxQueueBytes {
			t.Fatal("the queue of refused streams has no bound")
		}
	}
}

// A stream that the client has reset counts until the server has ended it, because the server counts it too.
func TestAResetStreamCountsUntilTheServerEndsIt(t *testing.T) {
	c := &Conn{streamLimit: 2, streams: map[uint32]*Stream{5: {}}, unendedByServer: map[uint32]struct{}{3: {}}}
	if !c.overStreamLimit() {
		t.Error("the server would count three streams")
	}
	delete(c.unendedByServer, 3)
	if c.overStreamLimit() {
		t.Error("a stream is refused that the server accepts")
	}
}

// The server's ends of detached streams are dropped, however the server divides its frames into writes.
func TestEndsAreDroppedFromWritesOfAnySize(t *testing.T) {
	certificates := serve(t, http.NotFoundHandler()).TLS.Certificates
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		serverSide, clientSide := net.Pipe()
		c := NewConn(tls.Server(serverSide, &tls.Config{Certificates: certificates}), time.Second, 100)
		c.unendedByServer = map[uint32]struct{}{}
		var all, want []byte
		for id := uint32(1); id < 60; id += 2 {
			frame := frameOf(frameData, 0, id, bytes.Repeat([]byte{byte(id)}, r.IntN(1+r.IntN(40_000))))
			all, want = append(all, frame...), append(want, frame...)
			end := frameOf(frameData, flagEndStream, id, nil)
			if all = append(all, end...); r.IntN(2) == 0 {
				c.unendedByServer[id] = struct{}{}
			} else {
				want = append(want, end...)
			}
		}
		got := make([]byte, len(want))
		read := make(chan error, 1)
		client := tls.Client(clientSide, &tls.Config{InsecureSkipVerify: true})
		go func() { _, err := io.ReadFull(client, got); read <- err }()
		for rest := all; len(rest) > 0; {
			n := min(len(rest), 1+r.IntN(1+r.IntN(5000)))
			if _, err := c.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := <-read; err != nil || !bytes.Equal(got, want) {
			t.Fatalf("seed %d: the client receives other frames, %v", seed, err)
		}
		if len(c.unendedByServer) > 0 {
			t.Errorf("seed %d: %d ends were not dropped", seed, len(c.unendedByServer))
		}
		client.NetConn().Close()
	}
}
