package h2writer

import (
	"io"
	"net/http"
	"testing"
	"time"
)

// While the buffers of all connections and of an owner take too much, a connection of the owner queues a TLS record at
// most. Longer writes still arrive. Connections of other owners have the usual limit.
func TestQueuesAreShortWhileBuffersTakeTooMuch(t *testing.T) {
	bufferedBytes.Add(maxBufferedBytes + 1)
	t.Cleanup(func() { bufferedBytes.Add(-maxBufferedBytes - 1) })
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	watch := hijackHandler(func(s *Stream) { hijacked <- s }, end)
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		SetOwner(req, "a")
		SetOwner(req, "b") // the first stays
		watch(w, req)
	}))
	body := open(t, client(srv), srv.URL+"/watch").Body
	s := <-hijacked
	if n := s.conn.queueLimit(); n != maxQueueBytes {
		t.Errorf("a queue of an owner without many bytes has %d bytes", n)
	}
	if s.conn.owner.name != "a" {
		t.Errorf("the owner is %q", s.conn.owner.name)
	}
	s.conn.owner.bufferedBytes.Add(maxOwnBufferedBytes + 1)
	if accepted, queueFull := s.TryWrite(make([]byte, minQueueBytes+1)); accepted || queueFull {
		t.Errorf("more than a queue: accepted %v, queue full %v", accepted, queueFull)
	}
	if accepted, _ := s.TryWrite(make([]byte, minQueueBytes)); !accepted {
		t.Error("a full queue is not accepted")
	}
	s.conn.mu.Lock()
	if n := cap(s.conn.queue); n > 16<<10 {
		t.Errorf("a full queue takes %d bytes", n)
	}
	s.conn.mu.Unlock()
	if accepted, queueFull := s.TryWrite([]byte{0}); accepted || !queueFull {
		t.Errorf("after a full queue: accepted %v, queue full %v", accepted, queueFull)
	}
	s.Flush()
	if err := s.Write(t.Context(), time.Minute, make([]byte, 300<<10)); err != nil {
		t.Error(err)
	}
	close(end)
	if got, err := io.ReadAll(body); err != nil || len(got) != len("head\n")+minQueueBytes+300<<10 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// A part that is longer than a queue is not queued, also if the queue is empty: a user may have many connections.
func TestALongPartIsNotQueued(t *testing.T) {
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	defer close(end)
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	open(t, client(srv), srv.URL+"/watch")
	s := <-hijacked
	if accepted, queueFull := s.TryWrite(make([]byte, maxQueueBytes+1)); accepted || queueFull {
		t.Errorf("accepted %v, queue full %v", accepted, queueFull)
	}
}

// A stream belongs to a single request.
func TestAStreamIsClaimedOnce(t *testing.T) {
	c := &Conn{streams: map[uint32]*Stream{1: {}}}
	if c.claim(3) != nil || c.claim(1) == nil || c.claim(1) != nil {
		t.Error("a stream belongs to two requests, or to none")
	}
}

// An owner is forgotten with its last connection.
func TestOwnersLeave(t *testing.T) {
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	watch := hijackHandler(func(s *Stream) { hijacked <- s }, end)
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		SetOwner(req, "leaves")
		watch(w, req)
	}))
	open(t, client(srv), srv.URL+"/watch")
	known := func() int {
		owners.Lock()
		defer owners.Unlock()
		if owners.byName["leaves"] == nil {
			return 0
		}
		return 1
	}
	if <-hijacked; known() == 0 {
		t.Error("the owner of an open connection is not known")
	}
	close(end)
	srv.CloseClientConnections()
	waitForCount(t, 0, "owners without a connection", known)
}
