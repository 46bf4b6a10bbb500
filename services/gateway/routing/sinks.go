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

	"watershed.dev/services/gateway/watch"
	"watershed.dev/services/gateway/wire"
)

// httpSink writes frames as a body without end.
type httpSink struct {
	call    *call
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

func (s *httpSink) Write(ctx context.Context, frames ...[]byte) error {
	if until, ok := ctx.Deadline(); ok {
		_ = s.control.SetWriteDeadline(until)
		defer func() { _ = s.control.SetWriteDeadline(time.Time{}) }()
	}
	for _, f := range frames {
		n, err := s.call.w.Write(f)
		s.written += int64(n)
		if err != nil {
			return err
		}
	}
	return s.control.Flush()
}

func (s *httpSink) Fail(err error) { s.call.fail(err) }

// Hijack implements watch.Sink.
func (s *httpSink) Hijack(ctx context.Context) *wire.Stream {
	if stream := wire.Of(s.call.req); stream != nil && stream.Hijack(ctx, s.written) {
		return stream
	}
	return nil
}

// overWebSocket sends each event as one message.
func (c *call) overWebSocket(hub *watch.Hub, r *watch.Request) {
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

func (s *socketSink) SendHeaders()                        {}
func (s *socketSink) Fail(error)                          {}
func (s *socketSink) Hijack(context.Context) *wire.Stream { return nil }

func (s *socketSink) Write(ctx context.Context, frames ...[]byte) error {
	until, _ := ctx.Deadline()
	_ = s.ws.SetWriteDeadline(until)
	for _, f := range frames {
		for len(f) > 0 {
			one, rest, err := s.split(f)
			if err != nil {
				return err
			}
			if err := websocket.Message.Send(s.ws, one); err != nil {
				return err
			}
			f = rest
		}
	}
	return nil
}

// split takes one event off: a message is a binary one as it is, or text.
func (s *socketSink) split(frames []byte) (one any, rest []byte, err error) {
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
