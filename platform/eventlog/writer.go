package eventlog

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protowire"

	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// maxUnacknowledged is the number of unacknowledged entries at which Flush waits. The last batch may exceed it.
	maxUnacknowledged = 512
	// maxBatch and batchBytes bound the events of a batch.
	maxBatch   = 64
	batchBytes = 64 << 10
	// batchPeriod bounds how long an event waits for others. It waits only if a message was published less than
	// batchPeriod before. A full batch, or an entry that does not join, ends the wait.
	batchPeriod = 2 * time.Millisecond
	// ackTimeout is how long the writer waits for an acknowledgement. A shorter stall of NATS does not end the writer.
	// If the leader of the stream is lost with the acknowledgement, the event waits so long.
	ackTimeout = 2 * time.Second
	// recentAck is how long the writer sends without waiting after it has sent a message that the log has stored. It is
	// less than the lease of a publisher (2 s), so no other publisher has appended.
	recentAck = time.Second
	// headroom is the size reserved for the headers of a message.
	headroom = 4 << 10
)

// Writer appends the entries of a core.Chain to the log. Events of a resource that follow each other closely share a
// message of the stream, a batch: each message of the stream costs NATS and every reader time.
//
//	empty ── Add ──▶ open ── Add: the batch is full, or the entry does not join ──▶ published
//	                 open ── Flush; FlushLater, then Due ───────────────────────────▶ published
//
// The methods belong to a single goroutine. A Writer appends all entries of a single chain: it counts its messages to
// expect their sequences.
type Writer struct {
	log LogID
	nc  *nats.Conn
	js  jetstream.JetStream
	// last is the sequence of the last message of each subject, as far as the writer knows it.
	last  map[string]uint64
	inbox string
	acks  chan Ack
	// freed makes Flush check unacknowledged again.
	freed chan struct{}
	// open is the entries of the open batch, and openBytes their size. due is the timer of FlushLater.
	open      []core.LogEntry
	openBytes int
	due       *time.Timer
	// data and compressed are buffers that batch uses again.
	data, compressed []byte
	// published counts the messages of the stream, and publishedAt is the time of the last.
	published   int
	publishedAt time.Time

	mu             sync.Mutex
	storedAfter    time.Time // when the last stored message was sent
	pending        []batch
	unacknowledged int // entries of pending
	newest         Ack
}

// Ack has the ID of the last entry that the log has stored, and the error of a later entry that it has not. All entries
// before a stored entry are stored.
type Ack struct {
	ID  core.ID
	Err error
}

// batch is a published message of the stream.
type batch struct {
	// reply is the subject of the acknowledgement, last the ID of the last entry, and size the number of entries.
	reply  string
	last   core.ID
	size   int
	traces []string
	sentAt time.Time
	timer  *time.Timer
}

// NewWriter returns a writer of the log, which reports acknowledgements until ctx is done.
func (l LogID) NewWriter(ctx context.Context, js jetstream.JetStream) (*Writer, error) {
	nc := js.Conn()
	w := &Writer{
		log:   l,
		nc:    nc,
		js:    js,
		last:  map[string]uint64{},
		inbox: nc.NewInbox(),
		acks:  make(chan Ack, 1),
		freed: make(chan struct{}, 1),
	}
	w.due = time.NewTimer(0)
	w.due.Stop()
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

// Add adds entries to the log, in order. Changes wait for Flush or Due. Progress and resets do not wait.
func (w *Writer) Add(ctx context.Context, entries ...core.LogEntry) error {
	for _, e := range entries {
		if !w.joins(&e) {
			if err := w.Flush(ctx); err != nil {
				return err
			}
		}
		w.open, w.openBytes = append(w.open, e), w.openBytes+sizeOf(&e)
		if !core.IsChange(e.Event) {
			if err := w.Flush(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// joins returns true if an entry can be part of the open batch.
func (w *Writer) joins(e *core.LogEntry) bool {
	n := len(w.open)
	return n == 0 || n < maxBatch && w.openBytes+sizeOf(e) <= w.maxBytes() && e.Joins(&w.open[n-1])
}

// maxBytes returns the limit of a batch's size.
func (w *Writer) maxBytes() int { return min(batchBytes, int(w.nc.MaxPayload())-headroom) }

// sizeOf returns the size of an entry in a batch. An entry that is compressed already fits into no batch with others.
func sizeOf(e *core.LogEntry) int {
	payload := e.Payload.(*nats.Msg)
	if isCompressed(payload) {
		return batchBytes
	}
	return len(payload.Data) + 1 + binary.MaxVarintLen32
}

// FlushLater publishes the open batch if batchPeriod has passed since the last message of the stream. Otherwise Due
// receives when it has.
func (w *Writer) FlushLater(ctx context.Context) error {
	if len(w.open) == 0 {
		return nil
	}
	if wait := batchPeriod - time.Since(w.publishedAt); wait > 0 {
		w.due.Reset(wait)
		return nil
	}
	return w.Flush(ctx)
}

// Due receives when the owner must call Flush.
func (w *Writer) Due() <-chan time.Time { return w.due.C }

// Flush publishes the open batch.
func (w *Writer) Flush(ctx context.Context) error {
	if len(w.open) == 0 {
		return nil
	}
	if err := w.awaitSpace(ctx); err != nil {
		return err
	}
	first, last, msg := w.open[0], w.open[len(w.open)-1], w.batch()
	msg.Subject = w.log.Subject(msg.Subject)
	msg.Header.Set(jetstream.MsgIDHeader, last.ID.String())
	// The leader of a cluster compares the sequence before it replicates the message. All copies compare the ID later.
	// In NATS 2.15 they stop if it differs.
	before := first.Begin + uint64(w.published)
	msg.Header.Set(jetstream.ExpectedLastSeqHeader, strconv.FormatUint(before, 10))
	previous, err := w.lastOf(ctx, msg.Subject)
	if err != nil {
		return err
	}
	msg.Header.Set(previousHeader, strconv.FormatUint(previous, 10))
	w.last[msg.Subject] = before + 1
	if !first.First {
		msg.Header.Set(jetstream.ExpectedLastMsgIDHeader, first.Expected.String())
	}
	sum := checksum(storedMessage(msg.Header, 0, msg.Data))
	msg.Header.Set(checksumHeader, sum)
	w.share(messageKey{last.ID.String(), sum})
	msg.Reply = w.track(last.ID)
	err = w.nc.PublishMsg(msg) // copies the data
	for _, e := range w.open {
		payloads.put(e.Payload.(*nats.Msg).Data)
	}
	clear(w.open)
	w.open, w.openBytes = w.open[:0], 0
	return err
}

// share lets the readers of this process use the events of the open batch. Readers change encrypted events. Events
// that are compressed by themselves are too large to share.
func (w *Writer) share(key messageKey) {
	events := make([]*logv1.Event, len(w.open))
	for i, e := range w.open {
		if e.Event.Encrypted != nil || isCompressed(e.Payload.(*nats.Msg)) {
			return
		}
		events[i] = e.Event
	}
	appended.Put(key, events, w.openBytes+decodedBytes*len(events))
}

// lastOf returns the sequence of the last message of a subject, or 0 if the stream holds none.
func (w *Writer) lastOf(ctx context.Context, subject string) (uint64, error) {
	if sequence, ok := w.last[subject]; ok {
		return sequence, nil
	}
	m, err := w.log.GetLast(ctx, w.js, subject)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("the last message of %s: %w", subject, err)
	}
	return m.Sequence, nil
}

// batch returns the message of the open batch. The next call changes its data.
func (w *Writer) batch() *nats.Msg {
	first := w.open[0].Payload.(*nats.Msg)
	msg := &nats.Msg{Subject: first.Subject, Data: first.Data, Header: maps.Clone(first.Header)}
	if len(w.open) == 1 {
		if len(msg.Data) <= batchBytes && !isCompressed(msg) { // Message has tried to compress a large event
			w.compressed = compressMessage(msg, s2Encoding, w.compressed)
		}
		return msg
	}
	w.data = w.data[:0]
	for _, e := range w.open {
		w.data = protowire.AppendTag(w.data, batchEvents, protowire.BytesType)
		w.data = protowire.AppendBytes(w.data, e.Payload.(*nats.Msg).Data)
	}
	msg.Data = w.data
	msg.Header.Set(encodingHeader, batchEncoding)
	w.compressed = compressMessage(msg, batchS2Encoding, w.compressed)
	return msg
}

// batchEvents is the number of the field Batch.events.
const batchEvents = 1

// awaitSpace waits while too many entries are unacknowledged. Without a recent acknowledgement it allows a single
// message in flight: another writer may have appended, and the sequence of a second message could match by chance.
func (w *Writer) awaitSpace(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for (w.unacknowledged >= maxUnacknowledged || len(w.pending) > 0 && time.Since(w.storedAfter) > recentAck) &&
		w.newest.Err == nil && ctx.Err() == nil {
		w.mu.Unlock()
		select {
		case <-w.freed:
		case <-ctx.Done():
		}
		w.mu.Lock()
	}
	return cmp.Or(w.newest.Err, ctx.Err())
}

// track adds the open batch, which ends with last, to pending. It returns the subject of the acknowledgement.
func (w *Writer) track(last core.ID) (reply string) {
	w.due.Stop()
	w.published++
	w.publishedAt = time.Now()
	reply = w.inbox + "." + strconv.Itoa(w.published)
	b := batch{reply: reply, last: last, size: len(w.open), sentAt: w.publishedAt}
	for _, e := range w.open {
		if e.Event.Traceparent != "" {
			b.traces = append(b.traces, e.Event.Traceparent)
		}
	}
	b.timer = time.AfterFunc(ackTimeout, func() { w.acknowledge(reply, jetstream.ErrAsyncPublishTimeout) })
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
		w.newest.ID, w.storedAfter = w.pending[n].last, w.pending[n].sentAt
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
