package eventlog

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// pendingMessages and pendingBytes bound a reader's subscription. The client drops messages beyond them, and the
	// reader reads these from the stream.
	pendingMessages = 16 << 10
	pendingBytes    = 64 << 20
	// compareAfter is after how long without a message a reader compares itself with the stream. Progress comes every 2 s.
	compareAfter = 3 * time.Second
	// pollInterval is how often an idle reader looks for a new connection.
	pollInterval = 250 * time.Millisecond
	// compareTimeout bounds one comparison with the stream.
	compareTimeout = 2 * time.Second
	// flushTimeout bounds the wait until NATS has the subscription.
	flushTimeout = 2 * time.Second
)

// Read calls handle with every event from the log's beginning on, in order, until ctx is done or handle returns an
// error. It survives the loss of NATS. Should the log have lost what comes next (it was away for longer than it is
// kept, or the log was made anew), handle is given a reset before it goes on: there may be a gap up to the reset's
// revision.
//
// Read has no consumer. It subscribes to the messages that NATS publishes again once the stream holds them, and reads
// from stored the messages that the subscription missed.
func Read(ctx context.Context, nc *nats.Conn, stream StreamReader, handle func(*logv1.Event) error) error {
	r := &reader{nc: nc, stream: stream, handle: handle}
	for {
		err := r.read(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var h *handlerError
		if errors.As(err, &h) {
			return h.error
		}
		level := slog.LevelWarn
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			level = slog.LevelInfo // the publisher makes it
		}
		slog.Log(ctx, level, "The event log cannot be read; trying again", "error", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

type handlerError struct{ error }

// reader is where a reader is in the log.
type reader struct {
	nc     *nats.Conn
	stream StreamReader
	handle func(*logv1.Event) error
	// created tells streams of the same name apart; sequence and id are those of the last message.
	created  int64
	sequence uint64
	id       string
	// afterGap: what was read last is not in the log any more, so the next message follows a gap.
	afterGap bool
}

var (
	// errMissed: the message does not follow the last one that was read.
	errMissed = errors.New("messages of the event log were missed")
	// errAnotherStream: the stream was deleted and made again. It is read from its beginning, after a reset.
	errAnotherStream = errors.New("the event log's stream was made anew")
)

func (r *reader) read(ctx context.Context) error {
	sub, err := r.nc.SubscribeSync(storedPrefix + ">")
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(pendingMessages, pendingBytes); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() })()
	connected := r.nc.StatusChanged(nats.CONNECTED)
	defer r.nc.RemoveStatusListener(connected)
	if err := r.catchUp(ctx); err != nil {
		return err
	}
	compared, lastSequence, due := time.Now(), r.sequence, false
	for {
		m, err := sub.NextMsg(pollInterval)
		if err == nil {
			err = r.next(m)
		}
		switch {
		case errors.Is(err, errMissed), errors.Is(err, nats.ErrSlowConsumer): // messages were dropped, maybe the last
			err = r.catchUp(ctx)
		case errors.Is(err, nats.ErrTimeout):
			err = nil
		}
		due = received(connected) || due
		switch {
		case err != nil:
			return err
		case r.sequence != lastSequence:
			compared, lastSequence = time.Now(), r.sequence
		case due || time.Since(compared) > compareAfter:
			ok, err := r.compare(ctx)
			if err != nil {
				return err
			}
			compared, due = time.Now(), due && !ok
		}
	}
}

func received(c <-chan nats.Status) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// next delivers a message of the subscription. It ignores a message that the reader has, and one without a sequence.
func (r *reader) next(m *nats.Msg) error {
	sequence, err := sequenceOf(m)
	switch {
	case err != nil, sequence <= r.sequence:
		return nil
	case sequence > r.sequence+1:
		return errMissed
	}
	return r.deliver(storedMessage(m.Header, sequence, m.Data), false)
}

// compare reads what the stream has and the subscription has not brought. If the stream cannot be read, compare returns
// false and the subscription goes on.
func (r *reader) compare(ctx context.Context) (ok bool, err error) {
	compareCtx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	err = r.catchUp(compareCtx)
	var h *handlerError
	if err == nil || errors.As(err, &h) {
		return true, err
	}
	slog.Warn("The event log cannot be compared with what was read", "error", err)
	return false, ctx.Err()
}

// catchUp reads from the stream up to its end.
func (r *reader) catchUp(ctx context.Context) error {
	if err := r.nc.FlushTimeout(flushTimeout); err != nil { // the subscription has messages that the stream gets later
		return err
	}
	for {
		again := false
		request := &logv1.ReadRequest{}
		if r.sequence > 0 {
			request.Sequence = r.sequence + 1
		}
		err := r.stream.Messages(ctx, request, func(c *logv1.Chunk) error {
			if r.reposition(c) {
				again = true
				return errMissed
			}
			for _, m := range c.Messages {
				if err := r.deliver(m, true); err != nil {
					return err
				}
			}
			return nil
		})
		if !again {
			return err
		}
	}
}

// reposition returns true if the stream does not continue at the reader's position, and moves the reader.
func (r *reader) reposition(c *logv1.Chunk) bool {
	previous := r.created
	r.created = c.Created
	switch {
	case r.sequence == 0:
		return false
	case c.Created != previous: // another stream: from its beginning, which is a reset
		r.sequence, r.id, r.afterGap = 0, "", true
		return true
	case c.Last < r.sequence: // its end is lost, and the messages up to Last may be others
		r.sequence, r.id, r.afterGap = c.Last, "", true
		return true
	}
	return false
}

// deliver hands one message to handle. If it does not follow the last message, deliver hands on a reset first. Only a
// message that was read from the stream proves such a gap; for another one, deliver returns errMissed.
func (r *reader) deliver(m *logv1.StoredMessage, fromStream bool) error {
	e, err := decode(m.Encoding, m.Data)
	if err != nil {
		slog.Error("A message of the event log is corrupt", "sequence", m.Sequence, "error", err)
		id, _ := ParseID(m.Id)
		e = &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: id.Revision}
	}
	if (e.Type != logv1.Type_TYPE_RESET || e.StorageResource != "") && (r.afterGap || r.id != "" && m.ExpectedLastMsgId != r.id) {
		if !fromStream {
			return errMissed
		}
		gap := &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: e.Revision}
		if e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Type != logv1.Type_TYPE_RESET && e.Index == 0 {
			gap.Revision--
		}
		slog.Warn("The event log has a gap", "before", e.Revision)
		if err := r.handle(gap); err != nil {
			return &handlerError{err}
		}
	}
	r.afterGap, r.id = false, m.Id
	if err := r.handle(e); err != nil {
		return &handlerError{err}
	}
	r.sequence = m.Sequence
	return nil
}
