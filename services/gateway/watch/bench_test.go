package watch

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"watershed.dev/platform/events"
	"watershed.dev/services/gateway/h2writer"
)

// serveHTTP2 serves handler over h2writer connections of n streams, and returns a client of them.
func serveHTTP2(t testing.TB, n int, handler http.Handler) (*httptest.Server, *http.Client) {
	handler = h2writer.Handler(handler)
	s := httptest.NewUnstartedServer(handler)
	h2 := &http2.Server{MaxConcurrentStreams: uint32(n)}
	if err := http2.ConfigureServer(s.Config, h2); err != nil {
		t.Fatal(err)
	}
	s.Config.TLSNextProto["h2"] = func(srv *http.Server, conn *tls.Conn, _ http.Handler) {
		c := h2writer.NewConn(conn, time.Minute, n)
		h2.ServeConn(c, &http2.ServeConnOpts{
			Context:    c.WithConn(context.Background()),
			BaseConfig: srv,
			Handler:    handler,
		})
	}
	s.TLS = &tls.Config{NextProtos: []string{"h2"}}
	s.StartTLS()
	t.Cleanup(s.Close)
	conf := s.Client().Transport.(*http.Transport).TLSClientConfig
	return s, &http.Client{Transport: &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}}
}

// watchStreams returns n streams of a single HTTP/2 connection, whose client discards the data.
func watchStreams(b *testing.B, n int) (streams []*h2writer.Stream) {
	opened, ended := make(chan *h2writer.Stream, n), make(chan struct{})
	s, client := serveHTTP2(b, n, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		s := h2writer.StreamFrom(req)
		if !s.Hijack(req.Context(), 0) {
			b.Error("the stream is not hijacked")
		}
		opened <- s
		<-ended
	}))
	b.Cleanup(func() { close(ended) })
	for range n {
		resp, err := client.Get(s.URL)
		if err != nil {
			b.Fatal(err)
		}
		go func() {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}()
		streams = append(streams, <-opened)
	}
	return streams
}

// BenchmarkDispatch measures an event of 500 bytes to 100 receivers: over HTTP/1.1, in which the client's goroutine
// takes the event, and over HTTP/2, in which the broadcast writes it, plain or compressed.
func BenchmarkDispatch(b *testing.B) {
	const receivers = 100
	for name, streams := range map[string]func() []*h2writer.Stream{
		"active":     func() []*h2writer.Stream { return make([]*h2writer.Stream, receivers) },
		"synced":     func() []*h2writer.Stream { return watchStreams(b, receivers) },
		"compressed": func() []*h2writer.Stream { return watchStreams(b, receivers) },
	} {
		b.Run(name, func(b *testing.B) {
			h := hub(newTier())
			broadcast := newTestBroadcast(h)
			var all []*receiver
			for _, s := range streams() {
				r := broadcast.join(&clientWatch{woken: make(chan struct{}, 1)}, events.Position{Revision: 1})
				r.stream, r.Direct, r.AllowBookmarks, r.BookmarkPeriod = s, s != nil, true, time.Minute
				all = append(all, r)
				if name == "compressed" {
					r.gzip = new(gzipBody)
				}
			}
			revision := int64(1)
			b.ReportAllocs()
			for b.Loop() {
				revision++
				broadcast.dispatch(newTestFrame(revision, 500))
				for _, r := range all {
					if parts, err := broadcast.next(r); err != nil {
						b.Fatal(err)
					} else if r.stream != nil && len(parts) > 0 { // plain also for a gzip body, which nothing reads
						if err := r.stream.Write(b.Context(), time.Minute, parts...); err != nil {
							b.Fatal(err)
						}
					}
				}
			}
		})
	}
}
