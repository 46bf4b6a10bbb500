package watch

import (
	"context"
	"errors"
	"time"

	"watershed.dev/platform/deflate"
	"watershed.dev/services/gateway/h2writer"
)

func (w *clientWatch) sendHeaders() {
	if !w.headersSent {
		w.headersSent = true
		w.sink.SendHeaders(w.gzip != nil)
	}
}

// hijack makes the client's response writable by the broadcast, if its connection supports that before the deadline.
func (w *clientWatch) hijack(ctx context.Context) {
	if w.hijackTried {
		return
	}
	w.hijackTried = true
	ctx, cancel := context.WithDeadline(ctx, w.Deadline)
	defer cancel()
	w.stream = w.sink.Hijack(ctx)
}

// write sends frames to the client, compressed for this watch alone if the response is a gzip body.
func (w *clientWatch) write(ctx context.Context, frames ...[]byte) error {
	if w.gzip != nil {
		return w.writePart(ctx, deflate.Compress(frames...))
	}
	n := 0
	for _, f := range frames {
		n += len(f)
	}
	return w.writeBytes(ctx, n, frames...)
}

// writePending sends pending entries of a broadcast. It gives up WriteTimeout after the watch's deadline, because a
// client that accepts a few bytes at a time is never slow.
func (w *clientWatch) writePending(ctx context.Context, frames ...[]byte) error {
	ctx, cancel := context.WithDeadline(ctx, w.Deadline.Add(w.hub.Config.WriteTimeout))
	defer cancel()
	return w.write(ctx, frames...)
}

// writePart sends a part of the gzip body.
func (w *clientWatch) writePart(ctx context.Context, part *deflate.Part) error {
	err := w.writeBytes(ctx, int(part.Size), w.gzip.part(part)...)
	if err != nil {
		w.gzip.broken = true
		return err
	}
	w.gzip.sent(part)
	return nil
}

// endTimeout bounds the wait for a client that must read the end of a response.
const endTimeout = time.Second

// endBody completes a gzip body, unless the client does not read it.
func (w *clientWatch) endBody(ctx context.Context) {
	if w.gzip == nil || w.gzip.broken || !w.headersSent || w.isClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if w.stream != nil {
		_ = w.stream.Write(ctx, endTimeout, w.gzip.end()...)
	} else {
		_ = w.sink.Write(ctx, endTimeout, w.gzip.end()...)
	}
}

// writeBytes sends bytes to the client. They occupy n bytes of memory until it has accepted them. It ends the watch if
// the client accepts no data for WriteTimeout, or for overQuotaTimeout if its user exceeds the in-flight quota. Other
// watches are not affected.
func (w *clientWatch) writeBytes(ctx context.Context, n int, frames ...[]byte) error {
	writeTimeout, hijacking, cancel := w.hub.Config.WriteTimeout, ctx, context.CancelFunc(func() {})
	defer w.inflight.account(-n)
	if w.inflight.account(n) {
		writeTimeout = min(writeTimeout, overQuotaTimeout)
		hijacking, cancel = context.WithTimeout(ctx, writeTimeout)
	}
	w.hijack(hijacking)
	cancel()
	var err error
	if w.stream != nil {
		err = w.stream.Write(ctx, writeTimeout, frames...)
	} else {
		err = w.sink.Write(ctx, writeTimeout, frames...)
	}
	if errors.Is(err, h2writer.ErrSlowClient) {
		slowClients.Inc()
		w.terminated()
	}
	if err != nil {
		return errDone
	}
	return nil
}
