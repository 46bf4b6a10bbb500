package eventlog

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sort"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrExpired says that the log does not hold everything after a revision any more.
var ErrExpired = errors.New("the event log does not go back so far")

const (
	// replayBatch and replayBytes are how many messages, and bytes of them, are read before the log is asked whether it
	// still held them all.
	replayBatch = 256
	replayBytes = 4 << 20
	// replayIdle is how long NATS keeps a replay's consumer once nobody reads: the replay has ended.
	replayIdle = 5 * time.Second
	// replayQuiet is how long nothing may come until the log is asked whether what was to come is gone.
	replayQuiet = time.Second
)

// Replay calls each with the events of a stored resource after a revision, and with progress, in order, until each
// answers false or an error, or ctx is done. It is for those who need more than a reader keeps. ErrExpired comes
// where the log has a reset, or where its retention may have overtaken the reading: what each was given before is sound
// and has no gap. each is called for as many messages at a time as are known to follow each other, so it lags a little
// behind the log; it must be quick.
func Replay(ctx context.Context, js jetstream.JetStream, storedAs string, after int64,
	each func(*logv1.Event) (bool, error)) error {
	stream, err := js.Stream(ctx, StreamName)
	if err != nil {
		return err
	}
	info, err := stream.Info(ctx)
	if err != nil {
		return err
	}
	start, err := startAfter(ctx, stream, after)
	if err != nil {
		return err
	}
	consumer, err := js.OrderedConsumer(ctx, StreamName, jetstream.OrderedConsumerConfig{
		FilterSubjects:    []string{Subject(storedAs), ProgressSubject},
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       start,
		InactiveThreshold: replayIdle,
	})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(replayBatch))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, messages.Stop)()
	defer messages.Stop()
	defer deleteConsumer(js, consumer)
	r := &replay{
		stream:  stream,
		created: info.Created,
		whole:   start - 1,
		after:   after,
		each:    each,
	}
	for {
		m, err := messages.Next(jetstream.NextMaxWait(replayQuiet))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		more := true
		switch {
		case errors.Is(err, nats.ErrTimeout): // what is held may have no successor: retention took it away
			more, err = r.settle(ctx)
		case err == nil:
			more, err = r.buffer(ctx, m)
		}
		if err != nil || !more {
			return err
		}
	}
}

// replay is a reading of the log that retention may overtake: NATS delivers what is there, and says nothing of what is
// not.
type replay struct {
	stream  jetstream.Stream
	created time.Time
	// whole is a sequence: of what follows it, nothing was gone when it was last looked at.
	whole uint64
	after int64
	each  func(*logv1.Event) (bool, error)
	given bool
	// held are messages that have come since, as they came: what one unpacks to may be a hundred times as much.
	held  []jetstream.Msg
	bytes int
	last  uint64
}

// buffer holds a message until what has come is known to have no gap: at the end of a batch, and where nothing more is
// waiting.
func (r *replay) buffer(ctx context.Context, m jetstream.Msg) (more bool, err error) {
	meta, err := m.Metadata()
	if err != nil {
		return false, err
	}
	r.held, r.last = append(r.held, m), meta.Sequence.Stream
	r.bytes += len(m.Data())
	if len(r.held) < replayBatch && r.bytes < replayBytes && meta.NumPending > 0 {
		return true, nil
	}
	return r.settle(ctx)
}

// settle gives what is held, where nothing of what it follows is gone.
func (r *replay) settle(ctx context.Context) (more bool, err error) {
	info, err := r.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	if !info.Created.Equal(r.created) || info.State.FirstSeq > r.whole+1 {
		return false, ErrExpired
	}
	r.whole = max(r.whole, r.last)
	held := r.held
	r.held, r.bytes = nil, 0
	for _, m := range held {
		e, err := Event(m.Headers(), m.Data())
		if err != nil { // what it said cannot be known
			e = &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: math.MaxInt64}
		}
		switch {
		case e.Type == logv1.Type_TYPE_RESET && (r.given || e.Revision > r.after):
			return false, ErrExpired
		case e.Revision <= r.after:
			continue
		}
		r.given = true
		if more, err := r.each(e); err != nil || !more {
			return false, err
		}
	}
	return true, nil
}

// startAfter finds the sequence of a message before which everything is of the revision or older.
func startAfter(ctx context.Context, stream jetstream.Stream, after int64) (uint64, error) {
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, err
	}
	first, last := info.State.FirstSeq, info.State.LastSeq
	if info.State.Msgs == 0 {
		return 0, ErrExpired
	}
	before, err := revisionBefore(ctx, stream, first)
	if err != nil {
		return 0, err
	}
	if before > after {
		return 0, ErrExpired
	}
	var failed error
	n := sort.Search(int(last-first), func(i int) bool {
		before, err := revisionBefore(ctx, stream, first+uint64(i)+1)
		if err != nil {
			failed = err
		}
		return failed != nil || before > after
	})
	return first + uint64(n), failed
}

// revisionBefore is up to where everything has been said before a message: the revision of the one that it follows.
func revisionBefore(ctx context.Context, stream jetstream.Stream, sequence uint64) (int64, error) {
	m, err := stream.GetMsg(ctx, sequence)
	if err != nil {
		return 0, fmt.Errorf("message %d of the log: %w", sequence, err)
	}
	name := m.Header.Get(jetstream.ExpectedLastMsgIDHeader)
	if name == "" { // it begins the log
		name = m.Header.Get(jetstream.MsgIDHeader)
	}
	id, err := ParseID(name)
	if err != nil {
		return 0, err
	}
	if !id.Mark && id.Index == 0 && name == m.Header.Get(jetstream.MsgIDHeader) {
		return id.Revision - 1, nil
	}
	return id.Revision, nil
}
