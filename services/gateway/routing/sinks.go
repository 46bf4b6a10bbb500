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
	s.call.w.Header().Set("Content-Type", streamMediaType(s.call.out.MediaType))
	s.call.w.Header().Set("Transfer-Encoding", "chunked")
	if gzip {
		body.SetGzipHeaders(s.call.w.Header())
	}
	s.call.w.WriteHeader(http.StatusOK)
	_ = s.control.Flush()
}

// streamMediaType returns the media type of a watch, as kube-apiserver names it.
func streamMediaType(mediaType string) string {
	switch mediaType {
	case runtime.ContentTypeJSON:
		return mediaType
	case runtime.ContentTypeCBOR:
		return runtime.ContentTypeCBORSequence
	}
	return mediaType + ";stream=watch"
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
		hub.Serve(ctx, r, c.eventSink(&socketSink{ws, c.out.MediaType}))
		// The deadline of the last event may have passed. TLS cannot send anything valid after a write that timed out.
		_ = ws.SetWriteDeadline(time.Now().Add(closeTimeout))
	})
	handler.ServeHTTP(c.w, c.req)
}

type socketSink struct {
	ws        *websocket.Conn
	mediaType string
}

func (s *socketSink) SendHeaders(bool)                        {}
func (s *socketSink) Fail(error)                              {}
func (s *socketSink) Hijack(context.Context) *h2writer.Stream { return nil }

// Write implements watch.Sink. A client must read each event within the write timeout. A JSON event becomes a text
// message, another event a binary message.
func (s *socketSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	return eachEvent(frames, s.mediaType, func(event []byte) error {
		var message any = event
		if s.mediaType == runtime.ContentTypeJSON {
			message = string(event)
		}
		deadline := time.Now().Add(timeout)
		_ = s.ws.SetWriteDeadline(earlier(ctx, deadline))
		return slow(websocket.Message.Send(s.ws, message), deadline)
	})
}

// eachEvent calls f with each event of pieces, which are consecutive parts of a body. A protobuf event comes without
// the length of its frame. In CBOR, each piece is an event. f must not keep an event, because only an event that spans
// pieces is copied.
func eachEvent(pieces [][]byte, mediaType string, f func(event []byte) error) error {
	var begun []byte // the start of an event that ends in a later piece
	for _, data := range pieces {
		spans := len(begun) > 0
		if spans {
			data = append(begun, data...)
		}
		for len(data) > 0 {
			event, rest, ok := cutEvent(data, mediaType)
			if !ok {
				break
			}
			if err := f(event); err != nil {
				return err
			}
			data = rest
		}
		if begun = data; !spans {
			begun = bytes.Clone(data)
		}
	}
	if len(begun) > 0 {
		return errors.New("truncated watch frame")
	}
	return nil
}

// cutEvent returns the first event of data, and the rest. ok is false if data does not have the whole event.
func cutEvent(data []byte, mediaType string) (event, rest []byte, ok bool) {
	switch mediaType {
	case runtime.ContentTypeJSON:
		end := bytes.IndexByte(data, '\n') + 1
		return data[:end], data[end:], end > 0
	case runtime.ContentTypeProtobuf:
		if len(data) < 4 || uint64(len(data)) < 4+uint64(binary.BigEndian.Uint32(data)) {
			return nil, data, false
		}
		end := 4 + int(binary.BigEndian.Uint32(data))
		return data[4:end], data[end:], true
	}
	return data, nil, true
}
