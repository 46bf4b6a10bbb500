package eventlog

import (
	"context"
	"errors"
	"fmt"
	"sort"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrForgotten says that the log does not hold everything after a revision any more.
var ErrForgotten = errors.New("the event log does not go back so far")

// Replay calls each with the events of a stored resource after a revision, and with progress, in order, until each answers
// false or an error, or ctx is done. It is for those who need more than a reader keeps. ErrForgotten comes before the first event, or where the
// log has a reset.
func Replay(ctx context.Context, js jetstream.JetStream, storedAs string, after int64, each func(*logv1.Event) (bool, error)) error {
	stream, err := js.Stream(ctx, StreamName)
	if err != nil {
		return err
	}
	start, err := startAfter(ctx, stream, after)
	if err != nil {
		return err
	}
	consumer, err := js.OrderedConsumer(ctx, StreamName, jetstream.OrderedConsumerConfig{FilterSubjects: []string{Subject(storedAs), ProgressSubject},
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: start})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(256))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, messages.Stop)()
	defer messages.Stop()
	given := false
	for {
		m, err := messages.Next()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		e := &logv1.Event{}
		if err := proto.Unmarshal(m.Data(), e); err != nil {
			return ErrForgotten // what it said cannot be known
		}
		switch {
		case e.Type == logv1.Type_TYPE_RESET && (given || e.Revision > after):
			return ErrForgotten
		case e.Revision <= after:
			continue
		}
		given = true
		if more, err := each(e); err != nil || !more {
			return err
		}
	}
}

// startAfter finds the sequence of a message before which everything is of the revision or older.
func startAfter(ctx context.Context, stream jetstream.Stream, after int64) (uint64, error) {
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, err
	}
	first, last := info.State.FirstSeq, info.State.LastSeq
	if info.State.Msgs == 0 {
		return 0, ErrForgotten
	}
	before, err := revisionBefore(ctx, stream, first)
	if err != nil {
		return 0, err
	}
	if before > after {
		return 0, ErrForgotten
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
