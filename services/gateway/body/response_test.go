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

// held is a client that takes nothing until it is let go.
type held struct {
	http.ResponseWriter
	begun, let chan struct{}
}

func (h *held) Write(p []byte) (int, error) {
	select {
	case <-h.let:
	default:
		close(h.begun)
		<-h.let
	}
	return h.ResponseWriter.Write(p)
}

// An answer is whole in whatever pieces it is compressed, and who takes nothing keeps nobody else from compressing.
func TestACompressedAnswerIsWhole(t *testing.T) {
	whole := make([]byte, 5*deflate.TurnBytes+17)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(whole) // which compresses badly: much is to be written
	answer := func(w http.ResponseWriter) {
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		req.Header.Set("Accept-Encoding", "gzip")
		b := NewWriter(w, req, "application/json", http.StatusOK, int64(len(whole)))
		for left := whole; len(left) > 0; {
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
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, whole) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	slowClients := 2 * runtime.GOMAXPROCS(0)
	var slow []*held
	ended := make(chan *httptest.ResponseRecorder, slowClients)
	for range slowClients {
		w := httptest.NewRecorder()
		h := &held{w, make(chan struct{}), make(chan struct{})}
		slow = append(slow, h)
		go func() { answer(h); ended <- w }()
		<-h.begun
	}
	quick := httptest.NewRecorder()
	answer(quick)
	check(quick)
	for _, h := range slow {
		close(h.let)
		check(<-ended)
	}
}
