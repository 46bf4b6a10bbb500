package eventlog

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// stallWait is how long an append waits for a slot among the unacknowledged messages. A shorter stall of NATS does
	// not end the writer.
	stallWait = 5 * time.Second
	// headroom is the size reserved for the headers of a message.
	headroom = 4 << 10
)

// Writer appends to the log. Each message expects the id of the previous message, and JetStream rejects any other. Of
// two writers that begin after the same message, only one continues. After a failed append all later appends fail. A
// Writer belongs to one goroutine.
//
//	NewWriter ──Append──> appending ──error, or a rejected message──> failed: make a new Writer
//	          Restart: the next message expects the stream's sequence instead of an id, and must be a reset
type Writer struct {
	js jetstream.JetStream
	// last is the id of the last message that was sent.
	last ID
	// nonce, with the number of the message, distinguishes this writer's ids from those of other writers.
	nonce string
	sent  int
	// restart is true if the next message expects the sequence restartAfter instead of an id.
	restart      bool
	restartAfter uint64
	// maxBytes is the maximal size of a message.
	maxBytes int64
	// onAck is called with the id of each acknowledged message.
	onAck      func(ID)
	failed     chan error
	lastResult *publishResult
}

// publishResult is the result of publishing a message. err may be read once done is closed.
type publishResult struct {
	done chan struct{}
	err  error
}

// NewWriter returns a writer that continues after last, the id of the log's last message. maxPayload is the maximal
// size of a NATS message with its headers. onAck is called with the id of each acknowledged message, in any order and
// from any goroutine.
func NewWriter(js jetstream.JetStream, maxPayload int64, last ID, onAck func(ID)) *Writer {
	return &Writer{
		js:       js,
		last:     last,
		nonce:    rand.Text()[:8] + "-",
		maxBytes: maxPayload - headroom,
		onAck:    onAck,
		failed:   make(chan error, 1),
	}
}

// Restart makes the next message begin the log again, after the message with the stream's last sequence. The next
// message must be a reset.
func (w *Writer) Restart(sequence uint64) { w.restart, w.restartAfter = true, sequence }

// Last returns the id of the last sent message, or of the log's last message.
func (w *Writer) Last() ID { return w.last }

// Has returns true if the log already holds an event, because it ended inside the event's transaction when the writer
// began.
func (w *Writer) Has(e *logv1.Event) bool {
	return !w.last.Progress && e.Revision == w.last.Revision && e.Index <= w.last.Index
}

// UnsendableError is the error of an event that cannot be a message. Nothing was sent, and the next event may be
// appended.
type UnsendableError struct{ error }

// Check returns an *UnsendableError for an event that cannot be a message, or nil.
func (w *Writer) Check(e *logv1.Event) error {
	_, err := w.message(e)
	return err
}

func (w *Writer) message(e *logv1.Event) (*nats.Msg, error) {
	m, err := Message(e)
	if err == nil && int64(len(m.Data)) > w.maxBytes {
		err = fmt.Errorf("the event has %d bytes, more than a NATS message may have", len(m.Data))
	}
	if err != nil {
		return nil, &UnsendableError{err}
	}
	return m, nil
}

// Append sends an event without waiting for its acknowledgement. After an error other than *UnsendableError the writer
// is unusable, and the caller must make a new one.
func (w *Writer) Append(e *logv1.Event) error {
	m, err := w.message(e)
	if err != nil {
		return err
	}
	w.sent++
	id := IDOf(e, w.nonce+strconv.Itoa(w.sent))
	opts := []jetstream.PublishOpt{jetstream.WithMsgID(id.String()), jetstream.WithStallWait(stallWait)}
	if w.restart {
		opts = append(opts, jetstream.WithExpectLastSequence(w.restartAfter))
	} else {
		opts = append(opts, jetstream.WithExpectLastMsgID(w.last.String()))
	}
	ack, err := w.js.PublishMsgAsync(m, opts...)
	if err != nil {
		return err
	}
	w.last, w.restart = id, false
	w.lastResult = &publishResult{done: make(chan struct{})}
	go w.awaitAck(ack, id, w.lastResult, e.Traceparent, time.Now())
	return nil
}

// awaitAck waits for the result of a message.
func (w *Writer) awaitAck(ack jetstream.PubAckFuture, id ID, s *publishResult, traceparent string, since time.Time) {
	defer close(s.done)
	select {
	case <-ack.Ok(): // all earlier messages are stored too, because each message expects its predecessor
		telemetry.RecordEventSpan(traceparent, "log", since)
		w.onAck(id)
	case err := <-ack.Err():
		s.err = fmt.Errorf("publish %s: %w", id, err)
		select {
		case w.failed <- s.err:
		default:
		}
	}
}

// Failed returns a channel that receives the first rejected append.
func (w *Writer) Failed() <-chan error { return w.failed }

// Flush waits until all appended events are in the log. It waits for the last message only, because JetStream rejects
// the last message without its predecessors.
func (w *Writer) Flush(ctx context.Context) error {
	if w.lastResult == nil {
		return nil
	}
	select {
	case <-w.lastResult.done:
		return w.lastResult.err
	case <-ctx.Done():
		return ctx.Err()
	}
}
