package body

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// A slow body occupies only the bytes that have arrived, and no seat. The bodies of an owner are bounded. Small bodies
// and the control plane's bodies are always accepted (S6).
func TestBodiesAreBoundedPerUser(t *testing.T) {
	b := &Reader{}
	inside := 0
	var mu sync.Mutex
	h := b.ReadAhead(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		inside++
		mu.Unlock()
		data, err := io.ReadAll(req.Body)
		if u, _ := request.UserFrom(req.Context()); u.GetName() == user.Anonymous {
			return
		}
		if complete, ok := bufferedData(req); err != nil || ok && !bytes.Equal(complete, data) {
			t.Errorf("%d bytes, %v, %v", len(data), ok, err)
		}
	}), func(*http.Request) bool { return true })
	send := func(name string, body io.Reader, groups ...string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodPost, "/api/v1/namespaces/x/configmaps", body)
		req.ContentLength = -1
		ctx := request.WithUser(context.Background(), &user.DefaultInfo{Name: name, Groups: groups})
		ctx = request.WithRequestInfo(ctx, &request.RequestInfo{})
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req.WithContext(ctx))
		return w
	}
	const each = 1 << 20 // its buffer has then doubled
	var writers []*io.PipeWriter
	var wg sync.WaitGroup
	for range maxOwnerBytes / (2 * each) {
		r, w := io.Pipe()
		writers = append(writers, w)
		wg.Go(func() { send("system:serviceaccount:t:a", r) })
		if _, err := w.Write(make([]byte, each+1)); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	if inside != 0 {
		t.Errorf("%d requests started before their bodies had arrived", inside)
	}
	mu.Unlock()
	large := func() io.Reader { return strings.NewReader(strings.Repeat("x", 1<<20)) }
	if w := send("system:serviceaccount:t:b", large()); w.Code != http.StatusTooManyRequests {
		t.Errorf("another service account of the namespace exceeds the owner's limit: %d", w.Code)
	}
	for client, w := range map[string]*httptest.ResponseRecorder{
		"another namespace": send("system:serviceaccount:u:a", large()),
		"a small body":      send("system:serviceaccount:u:b", strings.NewReader("{}")),
		"a node":            send("system:node:n", large(), user.NodesGroup),
		"an administrator":  send("admin", large(), user.SystemPrivilegedGroup),
	} {
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d", client, w.Code)
		}
	}
	if w := send("system:serviceaccount:t:b", strings.NewReader("{}")); w.Code != http.StatusTooManyRequests {
		t.Errorf("small bodies exceed their owner's limit: %d", w.Code)
	}
	before := b.bytes
	if w := send(user.Anonymous, iotest.ErrReader(errors.New("an anonymous client's body was read")),
		user.AllUnauthenticated); w.Code != http.StatusOK || b.bytes != before {
		t.Errorf("an anonymous client: %d, %d bytes", w.Code, b.bytes-before)
	}
	for _, w := range writers {
		w.Close()
	}
	wg.Wait()
	if b.bytes != 0 || len(b.owners) != 0 {
		t.Errorf("%d bytes of %d owners are left", b.bytes, len(b.owners))
	}
}

func TestABodyThatIsTooLargeIsPassedOnSo(t *testing.T) {
	h := new(Reader).ReadAhead(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if _, complete := bufferedData(req); complete {
			t.Error("ReadAhead marks it complete")
		}
		if n, _ := io.Copy(io.Discard, req.Body); n != MaxBytes+1 {
			t.Errorf("%d bytes come through", n)
		}
	}), func(*http.Request) bool { return true })
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/",
		bytes.NewReader(make([]byte, MaxBytes+1000))))
}

// Any Content-Length is accepted, and the body decides.
func TestContentLengthIsNotTrusted(t *testing.T) {
	for _, length := range []int64{math.MaxInt64, 1, 3, 4095, 4096, 1 << 20, -1} {
		for _, n := range []int{1, 3, 4095, 4096, 4097, 100_000} {
			b := &Reader{}
			h := b.ReadAhead(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				if data, ok := bufferedData(req); !ok || len(data) != n {
					t.Errorf("Content-Length %d, body of %d bytes: read %d, %v", length, n, len(data), ok)
				}
			}), func(*http.Request) bool { return true })
			req := httptest.NewRequest(http.MethodPost, "/", iotest.OneByteReader(bytes.NewReader(make([]byte, n))))
			req.ContentLength = length
			h.ServeHTTP(httptest.NewRecorder(), req)
			if b.bytes != 0 || len(b.owners) != 0 {
				t.Errorf("%d bytes are left", b.bytes)
			}
		}
	}
}

// A body that breaks off costs the bytes that have arrived, for any Content-Length. 200 of these bodies took 600 MB.
func TestABrokenBodyCostsItsBytes(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 10 {
		req := httptest.NewRequest(
			http.MethodPost,
			"/",
			io.MultiReader(strings.NewReader("{"), iotest.ErrReader(io.ErrUnexpectedEOF)),
		)
		req.ContentLength = MaxBytes
		if data, err := Read(req); err == nil {
			t.Errorf("read %q", data)
		}
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > MaxBytes {
		t.Errorf("10 broken bodies allocated %d bytes", n)
	}
}

// If a client sends a part of its body and stops, no goroutine remains after the request's deadline, with or without
// read ahead.
func TestReadingABodyEndsWithItsRequestsTime(t *testing.T) {
	for name, ahead := range map[string]bool{"read ahead": true, "read by the handler": false} {
		t.Run(name, func(t *testing.T) {
			read := make(chan error, 1)
			h := new(Reader).ReadAhead(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				_, err := io.ReadAll(req.Body)
				read <- err
			}), func(*http.Request) bool { return ahead })
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				ctx, cancel := context.WithTimeout(req.Context(), 50*time.Millisecond)
				defer cancel()
				go h.ServeHTTP(w, req.WithContext(ctx)) // as server.withTimeout does
				<-ctx.Done()
			}))
			t.Cleanup(s.Close)
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			if _, err := io.WriteString(
				conn,
				"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nbegun",
			); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-read:
				if err == nil {
					t.Error("half a body is read without an error")
				}
			case <-time.After(2 * time.Minute):
				t.Error("the body is still being read")
			}
		})
	}
}

// deadlines records the read deadlines of a connection.
type deadlines struct {
	*httptest.ResponseRecorder
	set []time.Time
}

func (d *deadlines) SetReadDeadline(at time.Time) error {
	d.set = append(d.set, at)
	return nil
}

// The client must send a whole body within 30 s, even if bytes arrive steadily.
func TestAWholeBodyHas30Seconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		r, w := io.Pipe()
		go func() {
			for range 60 {
				time.Sleep(time.Second)
				_, _ = w.Write([]byte("x"))
			}
			w.Close()
		}()
		d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
		h := new(Reader).ReadAhead(http.NotFoundHandler(), func(*http.Request) bool { return true })
		h.ServeHTTP(d, httptest.NewRequest(http.MethodPost, "/", r))
		want := []time.Time{began.Add(30 * time.Second), {}} // the last deadline is the zero time: none
		if !slices.EqualFunc(d.set, want, time.Time.Equal) {
			t.Errorf("deadlines are %v, want %v", d.set, want)
		}
	})
}

// All bodies together have 512 MB. Bodies of up to 64 KB have 1 GB.
func TestAllBodiesTogetherAreBounded(t *testing.T) {
	for _, x := range []struct {
		held, bytes int
		want        bool
	}{
		{512<<20 - 65<<10, 65 << 10, true},
		{512<<20 - 65<<10 + 1, 65 << 10, false},
		{1<<30 - 64<<10, 64 << 10, true},
		{1<<30 - 64<<10 + 1, 64 << 10, false},
	} {
		h := &bodyBuffer{reader: &Reader{bytes: x.held}, owner: "a"}
		if got := h.reserve(x.bytes); got != x.want {
			t.Errorf("%d bytes beside %d: %v, want %v", x.bytes, x.held, got, x.want)
		}
	}
}

// endedWriter is a writer of HTTP/2 after the end of its stream.
type endedWriter struct{ http.ResponseWriter }

func (endedWriter) SetReadDeadline(time.Time) error { panic("no stream") }

// A handler may outlive its request, whose writer then has no stream. It ends without a panic.
func TestAHandlerMayOutliveItsRequest(t *testing.T) {
	called := false
	h := (&Reader{}).ReadAhead(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called = true }),
		func(*http.Request) bool { return true })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	h.ServeHTTP(endedWriter{}, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader("{}")))
	if !called {
		t.Error("the next handler is not called")
	}
}

// A node has the quota of an owner, and its bodies are accepted if the quota of all is exceeded.
func TestANodesBodiesAreBounded(t *testing.T) {
	b := &Reader{bytes: maxInflightBytes}
	node := &bodyBuffer{reader: b, owner: "system:node:n", anyTotal: true}
	if !node.reserve(maxOwnerBytes) || node.reserve(1) {
		t.Error("a node's bodies have another bound than an owner's")
	}
	administrator := &bodyBuffer{reader: b, owner: "admin", anyTotal: true, anyOwned: true}
	if !administrator.reserve(2 * maxOwnerBytes) {
		t.Error("an administrator's body is refused")
	}
}
