package eventlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// maxUnacknowledged is how many messages a writer sends before it waits for acknowledgements. maxBatch is how many
	// messages share an acknowledgement at most.
	maxUnacknowledged = 512
	maxBatch          = 64
	// ackTimeout is how long the writer waits for an acknowledgement. A shorter stall of NATS does not end the writer.
	ackTimeout = 5 * time.Second
	// headroom is the size reserved for the headers of a message.
	headroom = 4 << 10
)

// Writer appends the messages of a core.Chain to the log, in batches. JetStream acknowledges only the last message of a
// batch: it rejects a message that does not follow its predecessor, so the last is stored only if all are. NATS' atomic
// batches were the obvious alternative. They do not support an expected message ID, and write each message twice.
//
// Send belongs to a single goroutine.
type Writer struct {
	nc    *nats.Conn
	inbox string
	acks  chan Ack
	// freed makes Send check unacknowledged again.
	freed chan struct{}
	// open is the batch whose last message is not sent, and held its next message, without an event if there is none.
	// batches counts the batches.
	open    batch
	held    core.Message
	batches int

	mu             sync.Mutex
	pending        []batch
	unacknowledged int // messages of pending
	newest         Ack
}

// Ack is the last message that the log has stored, and the error of a later message that it has not. All messages
// before a stored message are stored.
type Ack struct {
	ID  core.ID
	Err error
}

// batch is messages that share an acknowledgement.
type batch struct {
	// reply is the subject of the acknowledgement, and last the ID of the last message.
	reply  string
	last   core.ID
	size   int
	traces []string
	sentAt time.Time
	timer  *time.Timer
}

// NewWriter returns a writer, which reports acknowledgements until ctx is done.
func NewWriter(ctx context.Context, nc *nats.Conn) (*Writer, error) {
	w := &Writer{nc: nc, inbox: nc.NewInbox(), acks: make(chan Ack, 1), freed: make(chan struct{}, 1)}
	sub, err := nc.Subscribe(w.inbox+".*", func(m *nats.Msg) { w.acknowledge(m.Subject, ackError(m)) })
	if err == nil {
		context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() })
	}
	return w, err
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

// Send sends messages in order, without waiting for their acknowledgement. If more messages follow at once, the batch
// continues with them, and the last message waits for them.
func (w *Writer) Send(ctx context.Context, more bool, messages ...core.Message) error {
	for _, m := range messages {
		if err := w.publish(ctx, w.held, w.open.size == maxBatch-1); err != nil {
			return err
		}
		w.held = m
	}
	if more {
		return nil
	}
	last := w.held
	w.held = core.Message{}
	return w.publish(ctx, last, true)
}

// publish publishes a message. The message may be the last of its batch.
func (w *Writer) publish(ctx context.Context, m core.Message, last bool) error {
	if m.Event == nil {
		return nil
	}
	if w.open.size == 0 {
		if err := w.awaitSpace(ctx); err != nil {
			return err
		}
		w.open.sentAt = time.Now()
	}
	w.open.size++
	if m.Event.Traceparent != "" {
		w.open.traces = append(w.open.traces, m.Event.Traceparent)
	}
	msg := m.Payload.(*nats.Msg)
	msg.Header.Set(jetstream.MsgIDHeader, m.ID.String())
	if m.First {
		msg.Header.Set(jetstream.ExpectedLastSeqHeader, strconv.FormatUint(m.ExpectedSequence, 10))
	} else {
		msg.Header.Set(jetstream.ExpectedLastMsgIDHeader, m.Expected.String())
	}
	if last {
		msg.Reply = w.closeBatch(m.ID)
	}
	return w.nc.PublishMsg(msg)
}

// awaitSpace waits while too many messages are not acknowledged.
func (w *Writer) awaitSpace(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.unacknowledged >= maxUnacknowledged && w.newest.Err == nil && ctx.Err() == nil {
		w.mu.Unlock()
		select {
		case <-w.freed:
		case <-ctx.Done():
		}
		w.mu.Lock()
	}
	return cmp.Or(w.newest.Err, ctx.Err())
}

// closeBatch ends the batch with its last message, and returns the subject of its acknowledgement.
func (w *Writer) closeBatch(last core.ID) (reply string) {
	w.batches++
	reply = w.inbox + "." + strconv.Itoa(w.batches)
	b := w.open
	b.reply, b.last = reply, last
	b.timer = time.AfterFunc(ackTimeout, func() { w.acknowledge(reply, jetstream.ErrAsyncPublishTimeout) })
	w.open = batch{}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pending = append(w.pending, b)
	w.unacknowledged += b.size
	return reply
}

// Acks returns a channel that receives the newest acknowledgement.
func (w *Writer) Acks() <-chan Ack { return w.acks }

// acknowledge records the result of the batch with a reply subject. All batches before a stored batch are stored.
func (w *Writer) acknowledge(reply string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for n < len(w.pending) && w.pending[n].reply != reply {
		n++
	}
	if n == len(w.pending) { // it has a result
		return
	}
	if err != nil {
		w.newest.Err = cmp.Or(w.newest.Err, fmt.Errorf("publish up to %s: %w", w.pending[n].last, err))
	} else {
		w.newest.ID = w.pending[n].last
	}
	for _, b := range w.pending[:n+1] {
		b.timer.Stop()
		w.unacknowledged -= b.size
		for _, t := range b.traces {
			if err == nil {
				telemetry.RecordEventSpan(t, "log", b.sentAt)
			}
		}
	}
	w.pending = w.pending[n+1:]
	select { // the newest replaces an acknowledgement that was not received
	case <-w.acks:
	default:
	}
	w.acks <- w.newest
	if w.unacknowledged > maxUnacknowledged-maxBatch && w.newest.Err == nil {
		return // Send wakes up for several messages
	}
	select {
	case w.freed <- struct{}{}:
	default:
	}
}

// ackError returns the error in JetStream's response to a message, or nil if the message is stored.
func ackError(m *nats.Msg) error {
	if m.Header.Get("Status") == "503" {
		return nats.ErrNoResponders
	}
	var response struct {
		Stream string              `json:"stream"`
		Error  *jetstream.APIError `json:"error"`
	}
	switch err := json.Unmarshal(m.Data, &response); {
	case err != nil:
		return err
	case response.Error != nil:
		return response.Error
	case response.Stream == "":
		return errors.New("the response names no stream")
	}
	return nil
}
