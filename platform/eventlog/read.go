package eventlog

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// pendingMessages and pendingBytes bound a reader's subscription. The NATS client drops messages beyond the bounds,
	// and the reader then reads them from the stream.
	pendingMessages = 16 << 10
	pendingBytes    = 64 << 20
	// compareAfter is the time without a message after which a reader compares its position with the stream. Without
	// requests, the publisher sends progress every 10 s.
	compareAfter = 3 * time.Second
	// pollInterval is how often an idle reader checks for a reconnect.
	pollInterval = 250 * time.Millisecond
	// compareTimeout bounds one comparison with the stream.
	compareTimeout = 2 * time.Second
	// flushTimeout bounds the wait until NATS has received the subscription.
	flushTimeout = 2 * time.Second
)

// Read calls handle with every event from the beginning of the log, in order, until ctx is done or handle returns an
// error. It reconnects when NATS is lost. If the log no longer holds the next message, Read calls handle with a reset
// first. There may then be a gap up to the revision of the reset. This happens if NATS was away for longer than the
// retention, or if the log was recreated.
//
// Read has no consumer. It subscribes to the subjects to which NATS republishes stored messages, and reads from stream
// the messages that the subscription missed.
//
//	subscribe ──> catchUp ──> live ──gap in sequences, slow consumer──> catchUp ──> live
//	                          live ──no message for compareAfter, reconnect──> compare ──> live
//	any error of the above ──200 ms──> subscribe
//	an error of handle, or ctx done ──> end
func (l LogID) Read(ctx context.Context, nc *nats.Conn, stream StreamReader, handle func(*logv1.Event) error) error {
	r := &reader{log: l, nc: nc, stream: stream, handle: handle}
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
			level = slog.LevelInfo // the publisher creates it
		}
		slog.Log(ctx, level, "The event log cannot be read; retrying", "error", err)
		if err := lifecycle.Sleep(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
}

type handlerError struct{ error }

// reader is a reader of the log.
type reader struct {
	core.Reader
	log    LogID
	nc     *nats.Conn
	stream StreamReader
	handle func(*logv1.Event) error
}

// errAnotherStream means that the stream was recreated. The reader starts at its beginning, after a reset.
var errAnotherStream = errors.New("the event log's stream was recreated")

func (r *reader) read(ctx context.Context) error {
	sub, err := r.nc.SubscribeSync(r.log.Subject(storedPrefix) + ">")
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
	compared, lastSequence, due := time.Now(), r.Sequence, false
	for {
		m, err := sub.NextMsg(pollInterval)
		if err == nil {
			err = r.next(m)
		}
		switch {
		case errors.Is(err, core.ErrMissed), errors.Is(err, nats.ErrSlowConsumer): // possibly the last is missing
			err = r.catchUp(ctx)
		case errors.Is(err, nats.ErrTimeout):
			err = nil
		}
		due = received(connected) || due
		switch {
		case err != nil:
			return err
		case r.Sequence != lastSequence:
			compared, lastSequence = time.Now(), r.Sequence
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

// next delivers a message of the subscription. It ignores a message that was already delivered or has no sequence.
func (r *reader) next(m *nats.Msg) error {
	sequence, err := sequenceOf(m)
	if err != nil {
		return nil
	}
	if next, err := r.Live(sequence); !next {
		return err
	}
	return r.deliver(storedMessage(m.Header, sequence, m.Data), true)
}

// compare reads the messages that the stream holds and the subscription missed. If the stream cannot be read, compare
// returns false and the subscription continues.
func (r *reader) compare(ctx context.Context) (ok bool, err error) {
	compareCtx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	err = r.catchUp(compareCtx)
	var h *handlerError
	if err == nil || errors.As(err, &h) {
		return true, err
	}
	slog.Warn("The position in the event log cannot be compared with the stream", "error", err)
	return false, ctx.Err()
}

// catchUp reads the stream up to its end.
func (r *reader) catchUp(ctx context.Context) error {
	if err := r.nc.FlushTimeout(flushTimeout); err != nil { // from here on the subscription receives new messages
		return err
	}
	for {
		again := false
		err := r.stream.Messages(ctx, r.Request(), func(c *logv1.Chunk) error {
			if r.Reposition(c) {
				again = true
				return core.ErrMissed
			}
			for _, m := range c.Messages {
				if err := r.deliver(m, false); err != nil {
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

// deliver calls handle with the events of a message, and with a reset before them if the message follows a gap.
func (r *reader) deliver(m *logv1.StoredMessage, live bool) error {
	decoded, _ := r.log.events(m)
	gap, events, err := r.Next(m, decoded, live)
	if err != nil {
		return err
	}
	if gap != nil {
		slog.Warn("The event log has a gap", "before", events[0].Revision)
		if err := r.handle(gap); err != nil {
			return &handlerError{err}
		}
	}
	for _, e := range events {
		if err := r.handle(e); err != nil {
			return &handlerError{err}
		}
	}
	return nil
}
