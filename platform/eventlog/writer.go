package eventlog

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// stallWait is how long an append waits for a slot among the unacknowledged messages. A shorter stall of NATS does
	// not end the writer.
	stallWait = 5 * time.Second
	// headroom is the size reserved for the headers of a message.
	headroom = 4 << 10
)

// Writer appends the messages of a core.Chain to the log. JetStream rejects a message that does not follow its
// predecessor, so all messages after a rejected message are rejected too. A Writer belongs to one goroutine.
type Writer struct {
	js   jetstream.JetStream
	acks chan Ack
	sent chan sentMessage
}

// Ack is the last message that the log has stored, and the error of a later message that it has not. All messages
// before a stored message are stored.
type Ack struct {
	ID  core.ID
	Err error
}

type sentMessage struct {
	jetstream.PubAckFuture
	id          core.ID
	traceparent string
	at          time.Time
}

// NewWriter returns a writer, which reports acknowledgements until ctx is done.
func NewWriter(ctx context.Context, js jetstream.JetStream) *Writer {
	w := &Writer{js: js, acks: make(chan Ack, 1), sent: make(chan sentMessage, maxUnacknowledged)}
	go w.awaitAcks(ctx)
	return w
}

// Encode returns the core.Encode for NATS messages of at most maxPayload bytes with their headers.
func Encode(maxPayload int64) core.Encode {
	return func(e *logv1.Event) (any, error) {
		m, err := Message(e)
		if err == nil && int64(len(m.Data)) > maxPayload-headroom {
			err = fmt.Errorf("the event has %d bytes, more than a NATS message may have", len(m.Data))
		}
		return m, err
	}
}

// Send sends a message without waiting for its acknowledgement.
func (w *Writer) Send(ctx context.Context, m core.Message) error {
	opts := []jetstream.PublishOpt{jetstream.WithMsgID(m.ID.String()), jetstream.WithStallWait(stallWait)}
	if m.First {
		opts = append(opts, jetstream.WithExpectLastSequence(m.ExpectedSequence))
	} else {
		opts = append(opts, jetstream.WithExpectLastMsgID(m.Expected.String()))
	}
	future, err := w.js.PublishMsgAsync(m.Payload.(*nats.Msg), opts...)
	if err != nil {
		return err
	}
	select {
	case w.sent <- sentMessage{future, m.ID, m.Event.Traceparent, time.Now()}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Acks returns a channel that receives the newest acknowledgement.
func (w *Writer) Acks() <-chan Ack { return w.acks }

// awaitAcks reports the results of sent messages, in order, up to the first failure.
func (w *Writer) awaitAcks(ctx context.Context) {
	for ack := (Ack{}); ; {
		select {
		case m := <-w.sent:
			select {
			case <-m.Ok():
				telemetry.RecordEventSpan(m.traceparent, "log", m.at)
				ack.ID = m.id
			case err := <-m.Err():
				ack.Err = cmp.Or(ack.Err, fmt.Errorf("publish %s: %w", m.id, err))
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
		select { // the newest replaces an acknowledgement that was not received
		case <-w.acks:
		default:
		}
		w.acks <- ack
	}
}
