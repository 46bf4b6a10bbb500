package h2writer

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// collecting is a collector that counts its writes. As in services/gateway/turns, a call waits for a write in progress.
type collecting struct {
	net.Conn
	mu         sync.Mutex
	collecting bool
	collected  []byte
	writes     int
}

func (c *collecting) Collect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.collecting = true
}

func (c *collecting) Flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.collected
	c.collecting, c.collected = false, nil
	c.writes++
	_, err := c.Conn.Write(p)
	return err
}

func (c *collecting) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.collecting {
		c.collected = append(c.collected, p...)
		return len(p), nil
	}
	c.writes++
	return c.Conn.Write(p)
}

// collectingPair returns a Conn above a collector, and its client after the handshake.
func collectingPair(t *testing.T, certificates []tls.Certificate) (*Conn, *collecting, *tls.Conn) {
	clientSide, serverSide := net.Pipe()
	socket := &collecting{Conn: serverSide}
	server := tls.Server(socket, &tls.Config{Certificates: certificates, SessionTicketsDisabled: true})
	client := tls.Client(clientSide, &tls.Config{InsecureSkipVerify: true})
	ended := make(chan error)
	go func() { ended <- server.Handshake() }()
	if err := client.Handshake(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	return NewConn(server, time.Minute, 100), socket, client
}

func (c *Conn) writeLocked(p []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeOut(p)
	return c.err
}

// The TLS records of a chunk are a single write, and arrive in order.
func TestAChunkIsOneWrite(t *testing.T) {
	c, socket, client := collectingPair(t, serve(t, http.NotFoundHandler()).TLS.Certificates)
	defer c.NetConn().Close()
	sent := make([]byte, 3*writeChunkBytes+100)
	_, _ = rand.Read(sent)
	before := socket.writes
	ended := make(chan error)
	go func() { ended <- c.writeLocked(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("the client receives other bytes, %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := socket.writes - before; n != 4 {
		t.Errorf("%d writes: want one for each chunk", n)
	}
}

// Close ends a write to a client that does not read, without a wait. The time is virtual.
func TestCloseEndsABlockedWrite(t *testing.T) {
	certificates := serve(t, http.NotFoundHandler()).TLS.Certificates
	synctest.Test(t, func(t *testing.T) {
		c, _, client := collectingPair(t, certificates)
		defer client.NetConn().Close()
		ended := make(chan error, 1)
		go func() { ended <- c.writeLocked(make([]byte, writeChunkBytes)) }()
		synctest.Wait()
		began := time.Now()
		_ = c.Close()
		if err := <-ended; err == nil || time.Since(began) > 0 {
			t.Errorf("the write ends after %s: %v", time.Since(began), err)
		}
	})
}
