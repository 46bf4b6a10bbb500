package h2writer

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// While the buffers of all connections take too much, a connection queues a TLS record at most. Longer writes still
// arrive.
func TestQueuesAreShortWhileBuffersTakeTooMuch(t *testing.T) {
	bufferedBytes.Add(maxBufferedBytes + 1)
	t.Cleanup(func() { bufferedBytes.Add(-maxBufferedBytes - 1) })
	hijacked, end := make(chan *Stream, 1), make(chan struct{})
	srv := serve(t, hijackHandler(func(s *Stream) { hijacked <- s }, end))
	body := open(t, client(srv), srv.URL+"/watch").Body
	s := <-hijacked
	if accepted, queueFull := s.TryWrite(make([]byte, minQueueBytes+1)); accepted || queueFull {
		t.Errorf("more than a queue: accepted %v, queue full %v", accepted, queueFull)
	}
	if accepted, _ := s.TryWrite(make([]byte, minQueueBytes)); !accepted {
		t.Error("a full queue is not accepted")
	}
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

// Connections whose clients read nothing return their buffers when they end.
func TestEndedConnectionsReturnTheirBuffers(t *testing.T) {
	before, ended := bufferedBytes.Load(), make(chan struct{})
	srv := serve(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		defer close(ended)
		w.(http.Flusher).Flush()
		s := StreamFrom(req)
		for ctx := req.Context(); s != nil && !s.Hijack(ctx, 0) && ctx.Err() == nil; {
			time.Sleep(time.Millisecond) // until the window update has arrived
		}
		for chunk := bytes.Repeat([]byte("z"), 100_000); s != nil; {
			if s.Write(context.Background(), time.Minute, chunk) != nil {
				return
			}
		}
	}))
	f := openRawStream(t, dialRaw(t, srv), http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30})
	if err := f.WriteWindowUpdate(0, 1<<30); err != nil {
		t.Fatal(err)
	}
	<-ended
	srv.Close()
	for deadline := time.Now().Add(time.Minute); bufferedBytes.Load() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes remain", bufferedBytes.Load()-before)
		}
	}
}
