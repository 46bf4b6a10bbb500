package body

import (
	"bytes"
	"compress/gzip"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"

	"watershed.dev/platform/deflate"
)

// blockedWriter is a client that accepts nothing until release is closed.
type blockedWriter struct {
	http.ResponseWriter
	started, release chan struct{}
}

func (h *blockedWriter) Write(p []byte) (int, error) {
	select {
	case <-h.release:
	default:
		close(h.started)
		<-h.release
	}
	return h.ResponseWriter.Write(p)
}

// A response is complete regardless of the pieces in which it is compressed. A client that accepts nothing does not
// block compression for others.
func TestCompressedResponseIsComplete(t *testing.T) {
	body := make([]byte, 5*deflate.TurnBytes+17)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(body) // random data compresses badly, so much is written
	writeResponse := func(w http.ResponseWriter) {
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		req.Header.Set("Accept-Encoding", "gzip")
		b := NewWriter(w, req, "application/json", http.StatusOK, int64(len(body)))
		for left := body; len(left) > 0; {
			n := min(len(left), 1+int(random.Uint64()%(2*deflate.TurnBytes)))
			if _, err := b.Write(left[:n]); err != nil {
				t.Error(err)
			}
			left = left[n:]
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	check := func(w *httptest.ResponseRecorder) {
		t.Helper()
		r, err := gzip.NewReader(w.Body)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	slowClients := 2 * runtime.GOMAXPROCS(0)
	var slow []*blockedWriter
	ended := make(chan *httptest.ResponseRecorder, slowClients)
	for range slowClients {
		w := httptest.NewRecorder()
		h := &blockedWriter{w, make(chan struct{}), make(chan struct{})}
		slow = append(slow, h)
		go func() { writeResponse(h); ended <- w }()
		<-h.started
	}
	quick := httptest.NewRecorder()
	writeResponse(quick)
	check(quick)
	for _, h := range slow {
		close(h.release)
		check(<-ended)
	}
}
