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

	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/watch"
)

// httpSink writes frames as a body without end.
type httpSink struct {
	call    *requestContext
	control *http.ResponseController
	written int64
}

func (s *httpSink) SendHeaders() {
	t := s.call.out.MediaType
	if t != runtime.ContentTypeJSON {
		t += ";stream=watch"
	}
	s.call.w.Header().Set("Content-Type", t)
	s.call.w.Header().Set("Transfer-Encoding", "chunked")
	s.call.w.WriteHeader(http.StatusOK)
	_ = s.control.Flush()
}

// writeAtOnce is how many bytes a client takes within its patience.
const writeAtOnce = 64 << 10

// Write implements watch.Sink.
func (s *httpSink) Write(ctx context.Context, patience time.Duration, frames ...[]byte) error {
	defer func() { _ = s.control.SetWriteDeadline(time.Time{}) }()
	var deadline time.Time
	left := 0
	for _, f := range frames {
		for len(f) > 0 {
			if left == 0 {
				if err := ctx.Err(); err != nil {
					return err
				}
				deadline, left = time.Now().Add(patience), writeAtOnce
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

// earlier returns until, or the end of ctx if that is earlier.
func earlier(ctx context.Context, until time.Time) time.Time {
	if end, ok := ctx.Deadline(); ok && end.Before(until) {
		return end
	}
	return until
}

// slow returns the error of a write that had time until then.
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

// serveWebSocket sends each event as one message.
func (c *requestContext) serveWebSocket(hub *watch.Hub, r *watch.Request) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	c.w.Header().Set("Content-Type", c.out.MediaType)
	handler := websocket.Handler(func(ws *websocket.Conn) {
		defer ws.Close()
		go func() { // a client that closes ends the watch
			defer cancel()
			_, _ = io.Copy(io.Discard, ws)
		}()
		hub.Serve(ctx, r, &socketSink{ws, c.out.MediaType == runtime.ContentTypeProtobuf})
	})
	handler.ServeHTTP(c.w, c.req)
}

type socketSink struct {
	ws     *websocket.Conn
	binary bool
}

func (s *socketSink) SendHeaders()                            {}
func (s *socketSink) Fail(error)                              {}
func (s *socketSink) Hijack(context.Context) *h2writer.Stream { return nil }

// Write implements watch.Sink. A client takes one event within its patience.
func (s *socketSink) Write(ctx context.Context, patience time.Duration, frames ...[]byte) error {
	for _, f := range frames {
		for len(f) > 0 {
			message, rest, err := s.split(f)
			if err != nil {
				return err
			}
			deadline := time.Now().Add(patience)
			_ = s.ws.SetWriteDeadline(earlier(ctx, deadline))
			if err := websocket.Message.Send(s.ws, message); err != nil {
				return slow(err, deadline)
			}
			f = rest
		}
	}
	return nil
}

// split takes one event off: a message is a binary one as it is, or text.
func (s *socketSink) split(frames []byte) (message any, rest []byte, err error) {
	if !s.binary {
		line, rest, _ := bytes.Cut(frames, []byte{'\n'})
		return string(line) + "\n", rest, nil
	}
	if len(frames) < 4 {
		return nil, nil, errors.New("a frame is cut short")
	}
	n := 4 + int(binary.BigEndian.Uint32(frames))
	if n > len(frames) {
		return nil, nil, errors.New("a frame is cut short")
	}
	return frames[4:n], frames[n:], nil
}
