package h2writer

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// countingConn counts a connection's writes.
type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// A response's headers, body and end are a single write. Flushed data reaches the client before the response continues.
func TestResponseIsOneWrite(t *testing.T) {
	var writes atomic.Int64
	var hold atomic.Int64
	hold.Store(int64(time.Minute))
	release := make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/waits" {
			_, _ = io.WriteString(w, "so far")
			w.(http.Flusher).Flush()
			<-release
			return
		}
		_, _ = io.WriteString(w, strings.Repeat("x", 8000))
	})
	s := serveAs(t, h, func(s *httptest.Server) {
		s.TLS.DynamicRecordSizingDisabled = true
		s.Listener = countingListener{s.Listener, &writes}
	}, func(c *Conn) { c.corkDelay = time.Duration(hold.Load()) })
	c := client(s)
	get := func(path string) *http.Response {
		t.Helper()
		resp, err := c.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	readResponse := func() {
		resp := get("/")
		defer resp.Body.Close()
		if data, err := io.ReadAll(resp.Body); err != nil || len(data) != 8000 {
			t.Fatalf("%d bytes, %v", len(data), err)
		}
	}
	readResponse() // also reads the settings
	const answers = 50
	before := writes.Load()
	for range answers {
		readResponse()
	}
	if n := writes.Load() - before; n > answers+answers/2 { // window updates and the like may add writes
		t.Errorf("%d writes for %d answers", n, answers)
	}
	hold.Store(int64(corkDelay))
	c = client(s) // another connection
	resp := get("/waits")
	defer resp.Body.Close()
	data := make([]byte, len("so far"))
	if _, err := io.ReadFull(resp.Body, data); err != nil || string(data) != "so far" {
		t.Errorf("%q, %v", data, err)
	}
	close(release)
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

type countingListener struct {
	net.Listener
	writes *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return countingConn{c, l.writes}, err
}

func TestInspectFrames(t *testing.T) {
	frame := func(kind http2.FrameType, flags byte, payload string) string {
		n := len(payload)
		return string([]byte{byte(n >> 16), byte(n >> 8), byte(n), byte(kind), flags, 0, 0, 0, 1}) + payload
	}
	headers, data := frame(http2.FrameHeaders, flagEndHeaders, "head"), frame(http2.FrameData, 0, "body")
	for name, c := range map[string]struct {
		bytes                string
		whole, plain, goesOn bool
	}{
		"nothing":              {"", true, true, true},
		"headers":              {headers, true, true, true},
		"headers and data":     {headers + data, true, true, true},
		"an end":               {headers + frame(http2.FrameData, flagEndStream, ""), true, true, false},
		"headers that end":     {frame(http2.FrameHeaders, flagEndHeaders|flagEndStream, "head"), true, true, false},
		"a reset":              {frame(http2.FrameRSTStream, 0, "1234"), true, true, false},
		"settings":             {frame(http2.FrameSettings, 0, ""), true, true, false},
		"a block that goes on": {frame(http2.FrameHeaders, 0, "head"), false, false, false},
		"the server's leave":   {frame(http2.FrameGoAway, 0, "12345678"), false, false, false},
		"half a frame":         {headers[:11], false, true, false},
		"half a head":          {headers + data[:5], false, true, true},
		"a frame too long":     {frame(http2.FrameData, 0, strings.Repeat("x", corkBytes))[:100], false, false, false},
	} {
		complete, bufferable, continues := inspectFrames([]byte(c.bytes))
		if complete != c.whole || bufferable != c.plain || complete && continues != c.goesOn {
			t.Errorf("%s: whole %v, plain %v, goes on %v", name, complete, bufferable, continues)
		}
	}
}
