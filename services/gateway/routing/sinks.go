package routing

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"time"

	"golang.org/x/net/websocket"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/watch"
)

// httpSink writes frames as a chunked response body.
type httpSink struct {
	call    *requestContext
	control *http.ResponseController
	written int64
}

func (s *httpSink) SendHeaders(gzip bool) {
	t := s.call.out.MediaType
	if t != runtime.ContentTypeJSON {
		t += ";stream=watch"
	}
	s.call.w.Header().Set("Content-Type", t)
	s.call.w.Header().Set("Transfer-Encoding", "chunked")
	if gzip {
		body.SetGzipHeaders(s.call.w.Header())
	}
	s.call.w.WriteHeader(http.StatusOK)
	_ = s.control.Flush()
}

// sliceBytes is the number of bytes that a client must read within the write timeout.
const sliceBytes = 64 << 10

// Write implements watch.Sink.
func (s *httpSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	defer func() { _ = s.control.SetWriteDeadline(time.Time{}) }()
	var deadline time.Time
	left := 0
	for _, f := range frames {
		for len(f) > 0 {
			if left == 0 {
				if err := ctx.Err(); err != nil {
					return err
				}
				deadline, left = time.Now().Add(timeout), sliceBytes
				_ = s.control.SetWriteDeadline(earlier(ctx, deadline))
			}
			n, err := s.call.w.Write(f[:min(len(f), left)])
			s.written += int64(n)
			if err != nil {
				return slow(err, deadline)
			}
			f, left = f[n:], left-n
		}
	}
	return slow(s.control.Flush(), deadline)
}

// earlier returns the earlier of until and ctx's deadline.
func earlier(ctx context.Context, until time.Time) time.Time {
	if end, ok := ctx.Deadline(); ok && end.Before(until) {
		return end
	}
	return until
}

// slow returns ErrSlowClient for a failed write whose deadline has passed, and err otherwise.
func slow(err error, until time.Time) error {
	if err != nil && !time.Now().Before(until) {
		return h2writer.ErrSlowClient
	}
	return err
}

func (s *httpSink) Fail(err error) { s.call.fail(err) }

// Hijack implements watch.Sink.
func (s *httpSink) Hijack(ctx context.Context) *h2writer.Stream {
	if stream := h2writer.StreamFrom(s.call.req); stream != nil && stream.Hijack(ctx, s.written) {
		return stream
	}
	return nil
}

// closeTimeout bounds the time to send the end of a WebSocket. It is crypto/tls's time for the end of a connection.
const closeTimeout = 5 * time.Second

// serveWebSocket sends each event as a WebSocket message.
func (c *requestContext) serveWebSocket(hub *watch.Hub, r *watch.Request) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	c.w.Header().Set("Content-Type", c.out.MediaType)
	handler := websocket.Handler(func(ws *websocket.Conn) {
		defer ws.Close()
		go func() { // the watch ends when the client closes the connection
			defer cancel()
			_, _ = io.Copy(io.Discard, ws)
		}()
		hub.Serve(ctx, r, &socketSink{ws, c.out.MediaType == runtime.ContentTypeProtobuf})
		// The deadline of the last event may have passed. TLS cannot send anything valid after a write that timed out.
		_ = ws.SetWriteDeadline(time.Now().Add(closeTimeout))
	})
	handler.ServeHTTP(c.w, c.req)
}

type socketSink struct {
	ws     *websocket.Conn
	binary bool
}

func (s *socketSink) SendHeaders(bool)                        {}
func (s *socketSink) Fail(error)                              {}
func (s *socketSink) Hijack(context.Context) *h2writer.Stream { return nil }

// Write implements watch.Sink. A client must read each event within the write timeout.
func (s *socketSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	for _, f := range frames {
		for len(f) > 0 {
			message, rest, err := s.split(f)
			if err != nil {
				return err
			}
			deadline := time.Now().Add(timeout)
			_ = s.ws.SetWriteDeadline(earlier(ctx, deadline))
			if err := websocket.Message.Send(s.ws, message); err != nil {
				return slow(err, deadline)
			}
			f = rest
		}
	}
	return nil
}

// split returns the first event as a message, and the rest. A protobuf event becomes a binary message, a JSON event a
// text message.
func (s *socketSink) split(frames []byte) (message any, rest []byte, err error) {
	if !s.binary {
		line, rest, _ := bytes.Cut(frames, []byte{'\n'})
		return string(line) + "\n", rest, nil
	}
	if len(frames) < 4 {
		return nil, nil, errors.New("truncated watch frame")
	}
	n := 4 + int(binary.BigEndian.Uint32(frames))
	if n > len(frames) {
		return nil, nil, errors.New("truncated watch frame")
	}
	return frames[4:n], frames[n:], nil
}
