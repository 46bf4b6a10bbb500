// Package loopback lets client-go call the gateway's API within the process, without a connection and without
// authentication. Each request runs on a goroutine of its own until its handler returns.
package loopback

import (
	"context"
	"io"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/recovery"
)

// requestTimeout bounds a request that is not a watch, as the server's --request-timeout does.
const requestTimeout = time.Minute

// ClientConfig returns the configuration of a client that calls h as a user. h must authorize the requests.
func ClientConfig(h http.Handler, as user.Info) *rest.Config {
	return &rest.Config{
		Host:          "https://gateway.internal",
		Transport:     &transport{h, as},
		QPS:           -1,
		UserAgent:     "watershed-gateway",
		ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeJSON},
	}
}

type transport struct {
	handler http.Handler
	user    user.Info
}

// RoundTrip implements http.RoundTripper. The body is streamed while the handler writes it, so that watches work.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		return nil, err
	}
	// The caller may itself serve a request. As on a connection, this request has none of the values of its context.
	ctx, cancel := withRequestTimeout(request.WithUser(context.Background(), t.user), info)
	stop := context.AfterFunc(req.Context(), cancel)
	inner := req.Clone(ctx)
	inner.RequestURI = req.URL.RequestURI()
	inner.RemoteAddr = "127.0.0.1:0"
	if inner.Body == nil {
		inner.Body = http.NoBody
	}
	body, out := io.Pipe()
	w := &writer{header: http.Header{}, out: out, headersSent: make(chan struct{})}
	go func() {
		defer cancel()
		defer stop()
		defer inner.Body.Close()
		defer func() {
			if r := recover(); r != nil { // as a server does: the response is cut off
				if r != http.ErrAbortHandler { //nolint:errorlint // it is this very value
					recovery.Observe("a request within the process", r)
				}
				w.sendHeaders(http.StatusInternalServerError)
				_ = out.CloseWithError(io.ErrUnexpectedEOF)
			}
		}()
		t.handler.ServeHTTP(w, inner)
		w.sendHeaders(http.StatusOK)
		_ = out.Close()
	}()
	select {
	case <-w.headersSent:
	case <-req.Context().Done():
		cancel()
		_ = body.CloseWithError(req.Context().Err())
		return nil, req.Context().Err()
	}
	return &http.Response{
		Status:     http.StatusText(w.code),
		StatusCode: w.code,
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     w.sentHeader,
		Body:       &responseBody{body, cancel},
		Request:    req,

		ContentLength: -1,
	}, nil
}

// withRequestTimeout returns a request's context. Only the client ends a watch.
func withRequestTimeout(ctx context.Context, info *request.RequestInfo) (context.Context, context.CancelFunc) {
	if info.Verb == "watch" {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, requestTimeout)
}

// responseBody is a response body whose Close cancels the request.
type responseBody struct {
	*io.PipeReader
	cancel context.CancelFunc
}

func (b *responseBody) Close() error {
	b.cancel()
	return b.PipeReader.Close()
}

// writer is the handler's ResponseWriter.
type writer struct {
	header      http.Header
	out         *io.PipeWriter
	once        sync.Once
	headersSent chan struct{}
	// code and sentHeader may be read once headersSent is closed.
	code       int
	sentHeader http.Header
}

func (w *writer) sendHeaders(code int) {
	w.once.Do(func() {
		w.code, w.sentHeader = code, w.header.Clone()
		close(w.headersSent)
	})
}

// Header implements http.ResponseWriter.
func (w *writer) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(code int) { w.sendHeaders(code) }

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (int, error) {
	w.sendHeaders(http.StatusOK)
	return w.out.Write(p)
}

// Flush implements http.Flusher. It only sends the headers, because the pipe has no buffer.
func (w *writer) Flush() { w.sendHeaders(http.StatusOK) }
