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
	// stallWait is how long an append waits for room among those that are not acknowledged yet: a NATS that stalls for
	// less is no reason to begin anew.
	stallWait = 5 * time.Second
	// headroom is what a message's headers may take.
	headroom = 4 << 10
)

// Writer appends to the log. Each message expects the one before it, and JetStream refuses any other: of two writers
// that begin after the same message only one goes on, and when an append fails, so do all after it. It is used by one
// goroutine.
type Writer struct {
	js jetstream.JetStream
	// last is the id of the last message that was sent.
	last ID
	// nonce keeps this writer's ids apart from those of others, with a number for each.
	nonce string
	sent  int
	// restart: the next message expects no id, but to come right after the stream's sequence number first.
	restart      bool
	restartAfter uint64
	// maxBytes is how many bytes a message may have.
	maxBytes int64
	// onAck is told of each message that the log has.
	onAck      func(ID)
	failed     chan error
	lastResult *publishResult
}

// publishResult is what became of a message. err may be read once done is closed.
type publishResult struct {
	done chan struct{}
	err  error
}

// NewWriter returns a writer that goes on after last, the id of the log's last message. maxPayload is how many bytes
// NATS takes in one message, its headers among them. acknowledged is called with the id of each message once the log
// has it, in any order and from any goroutine.
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

// Restart has the next message begin the log anew, after whatever has the stream's sequence number. It is to be a
// reset.
func (w *Writer) Restart(sequence uint64) { w.restart, w.restartAfter = true, sequence }

// Last is the id of the last message that was sent, or of the log's last one.
func (w *Writer) Last() ID { return w.last }

// Has says whether the log has an event already: it ended amid the event's transaction when this writer began.
func (w *Writer) Has(e *logv1.Event) bool {
	return !w.last.Progress && e.Revision == w.last.Revision && e.Index <= w.last.Index
}

// UnsendableError is the error of an event that can be no message: nothing was asked of NATS, and the next event may be
// appended.
type UnsendableError struct{ error }

// Check is an *UnsendableError for an event that can be no message, or nil.
func (w *Writer) Check(e *logv1.Event) error {
	_, err := w.message(e)
	return err
}

func (w *Writer) message(e *logv1.Event) (*nats.Msg, error) {
	m, err := Message(e)
	if err == nil && int64(len(m.Data)) > w.maxBytes {
		err = fmt.Errorf("it takes %d bytes, more than NATS takes in one message", len(m.Data))
	}
	if err != nil {
		return nil, &UnsendableError{err}
	}
	return m, nil
}

// Append sends an event, and does not wait until the log has it. An error that is no *UnsendableError is the writer's
// last: it is to be made anew.
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

// awaitAck waits for what becomes of a message.
func (w *Writer) awaitAck(ack jetstream.PubAckFuture, id ID, s *publishResult, traceparent string, since time.Time) {
	defer close(s.done)
	select {
	case <-ack.Ok(): // and so are all before it: each is refused without the one before
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

// Failed answers the first append that the log refused.
func (w *Writer) Failed() <-chan error { return w.failed }

// Flush waits until all that was appended is in the log: the last message is refused without those before it.
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
