package turns

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"testing"
	"time"
)

// connect returns both ends of a connection. The server's end has a small send buffer.
func connect(t *testing.T) (server, client net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l = NewListener(l)
	t.Cleanup(func() { l.Close() })
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close(); client.Close() })
	_ = server.(*conn).Conn.(*net.TCPConn).SetWriteBuffer(64 << 10)
	return server, client
}

// A response whose client does not read loses its turn. All bytes arrive once the client reads.
func TestABlockedWriteEndsTheTurn(t *testing.T) {
	s := New(1, time.Hour)
	server, client := connect(t)
	slow, ctx := s.NewTurn(WithConn(t.Context(), tls.Server(server, &tls.Config{})), "slow")
	if err := slow.Take(ctx); err != nil {
		t.Fatal(err)
	}
	sent := make([]byte, 16<<20)
	_, _ = rand.Read(sent)
	written := make(chan error)
	go func() {
		n, err := server.Write(sent)
		if n != len(sent) {
			err = errors.Join(err, io.ErrShortWrite)
		}
		written <- err
	}()
	other, otherCtx := s.NewTurn(t.Context(), "other")
	if err := other.Take(otherCtx); err != nil { // slow's turn would last an hour
		t.Fatal(err)
	}
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("the client receives other bytes, %v", err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	other.Yield()
	if err := slow.Take(ctx); err != nil || !slow.held {
		t.Errorf("%v: the turn is not held after the write", err)
	}
}

// Responses of a blocked connection hold no turn, and do not wait.
func TestABlockedConnectionHoldsNoTurn(t *testing.T) {
	s, blocked := New(1, time.Hour), &conn{}
	ctx := context.WithValue(t.Context(), connKey{}, blocked)
	first, ctx1 := s.NewTurn(ctx, "a")
	second, ctx2 := s.NewTurn(ctx, "a")
	if err := first.Take(ctx1); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error)
	go func() { waited <- second.Take(ctx2) }()
	blocked.block() // before or after second waits
	if err := errors.Join(<-waited, first.Take(ctx1)); err != nil || first.held || second.held || s.held != 0 {
		t.Errorf("%v, %d turns are held", err, s.held)
	}
	blocked.unblock()
	if err := first.Take(ctx1); err != nil || !first.held {
		t.Errorf("%v: no turn after the connection is free", err)
	}
	Yield(ctx1)
	if first.held || len(blocked.turns) > 0 {
		t.Error("the turn does not end")
	}
}

// Collected bytes reach the socket with Flush, in order.
func TestCollectedBytesWaitForFlush(t *testing.T) {
	server, client := connect(t)
	c := server.(*conn)
	c.Collect()
	sent := make([]byte, 200<<10)
	_, _ = rand.Read(sent)
	for p := range slices.Chunk(sent, 16<<10) {
		if n, err := c.Write(p); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
	}
	if !bytes.Equal(*c.collected, sent) {
		t.Error("a write has reached the socket before Flush")
	}
	ended := make(chan error)
	go func() {
		err := c.Flush()
		_, after := c.Write([]byte("after"))
		ended <- errors.Join(err, after, c.Flush())
	}()
	got := make([]byte, len(sent)+5)
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, append(sent, "after"...)) {
		t.Errorf("the client receives other bytes, %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	server.Close()
	c.Collect()
	_, _ = c.Write([]byte("x"))
	if err := c.Flush(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v: want the error of the closed connection", err)
	}
}

// Deadlines and closed connections end a write.
func TestWritesEnd(t *testing.T) {
	server, client := connect(t)
	data := make([]byte, 16<<20)
	_ = server.SetWriteDeadline(time.Now().Add(time.Second))
	n, err := server.Write(data)
	var timeout net.Error
	if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() ||
		n == 0 || n == len(data) {
		t.Errorf("%d bytes, %v", n, err)
	}
	_ = server.SetWriteDeadline(time.Time{})
	_ = client.Close()
	for err = nil; err == nil; {
		_, err = server.Write(data)
	}
	var failed *net.OpError
	if !errors.As(err, &failed) {
		t.Errorf("%T %v", err, err)
	}
	_ = server.Close()
	if _, err := server.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// WithConn ignores a connection that NewListener's listener did not accept. Nil Turns let all responses work.
func TestWithoutTurns(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	turn, ctx := New(1, time.Hour).NewTurn(WithConn(t.Context(), a), "")
	if err := turn.Take(ctx); err != nil || turn.conn != nil {
		t.Errorf("%v, connection %v", err, turn.conn)
	}
	var none *Turns
	turn, ctx = none.NewTurn(t.Context(), "")
	if err := turn.Take(ctx); err != nil {
		t.Error(err)
	}
	turn.Yield()
	Yield(ctx)
}

// A TLS handshake waits for its turn, but not for too long. An open connection holds no turn. A client that does not
// continue its handshake holds none either.
func TestHandshakesTakeTurns(t *testing.T) {
	s := New(1, time.Hour)
	s.maxWait = 2 * time.Second // the last handshake waits for it
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Listener = NewListener(server.Listener)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	same := func(*tls.ClientHelloInfo) (*tls.Config, error) { return nil, nil }
	server.TLS = &tls.Config{GetConfigForClient: s.Handshakes(same)}
	server.StartTLS()
	defer server.Close()
	other, ctx := s.NewTurn(t.Context(), "other")
	if err := other.Take(ctx); err != nil {
		t.Fatal(err)
	}
	responded := make(chan error, 1)
	get := func() {
		server.Client().CloseIdleConnections()
		resp, err := server.Client().Get(server.URL)
		if err == nil {
			resp.Body.Close()
		}
		responded <- err
	}
	go get()
	for s.Waiting() == 0 && len(responded) == 0 {
		time.Sleep(time.Millisecond) // between polls: nothing signals that a handshake waits
	}
	if len(responded) > 0 {
		t.Fatal("the handshake does not wait")
	}
	other.Yield()
	if err := <-responded; err != nil {
		t.Fatal(err)
	}
	address := server.Listener.Addr().String()
	silent, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	stopped := tls.Client(writeOnly{silent}, &tls.Config{InsecureSkipVerify: true})
	if err := stopped.Handshake(); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	if err := other.Take(ctx); err != nil { // the other turns would last an hour
		t.Fatal(err)
	}
	go get()
	if err := <-responded; err != nil {
		t.Errorf("a handshake without a turn: %v", err)
	}
	other.Yield()
}

// The handshake of a connection that the server closes does not wait.
func TestTheHandshakeOfAClosedConnectionEnds(t *testing.T) {
	s := New(1, time.Hour)
	s.maxWait = time.Hour
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	other, ctx := s.NewTurn(t.Context(), "other")
	if err := other.Take(ctx); err != nil {
		t.Fatal(err)
	}
	go func() {
		client, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err == nil {
			client.Close()
		}
	}()
	c, err := NewListener(l).Accept()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	same := func(*tls.ClientHelloInfo) (*tls.Config, error) { return nil, nil }
	go func() { ended <- tls.Server(c, &tls.Config{GetConfigForClient: s.Handshakes(same)}).Handshake() }()
	for s.Waiting() == 0 {
		time.Sleep(time.Millisecond) // between polls: nothing signals that a handshake waits
	}
	c.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the handshake ends with %v", err)
	}
	if n := s.Waiting(); n != 0 {
		t.Errorf("%d handshakes wait", n)
	}
}

// writeOnly is a connection that receives nothing.
type writeOnly struct{ net.Conn }

func (writeOnly) Read([]byte) (int, error) { return 0, io.EOF }
