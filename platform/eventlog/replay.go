package eventlog

import (
	"context"
	"errors"
	"time"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrExpired means that the log does not hold all messages after a revision.
var ErrExpired = core.ErrExpired

// replayPause is the delay between reads of a replay at the end of the log.
const replayPause = 100 * time.Millisecond

// Replay calls each with the events of a storage resource after a revision of an epoch, and with progress, in order. It
// ends when each returns false or an error, or ctx is done. Use it for events that a watch cache has evicted.
//
// Replay returns ErrExpired at a reset in the log, at another epoch, or if retention may have passed the reading
// position. The events before that are complete and have no gap. Replay calls each only for events whose order is
// certain, so it lags a little behind the log. each must be fast. Another error, for example of a recreated stream,
// does not mean that the log lacks events: Replay can be called again after the last complete revision.
func (l LogID) Replay(ctx context.Context, stream StreamReader, storedAs string, after int64, epoch string,
	each func(*logv1.Event) (bool, error)) error {
	r := core.NewReplay(after, epoch)
	for {
		err := stream.Messages(ctx, r.Request(storedAs),
			func(c *logv1.Chunk) error { return l.replayChunk(r, c, each) })
		if err != nil {
			if errors.Is(err, errStopReplay) {
				err = nil
			}
			return err
		}
		if err := lifecycle.Sleep(ctx, replayPause); err != nil {
			return err
		}
	}
}

// errStopReplay ends a replay when each returns false.
var errStopReplay = errors.New("enough")

// replayChunk calls each with the events of a chunk.
func (l LogID) replayChunk(r *core.Replay, c *logv1.Chunk, each func(*logv1.Event) (bool, error)) error {
	messages, err := r.Chunk(c)
	if err != nil {
		return err
	}
	for _, m := range messages {
		events, err := l.events(m)
		if err != nil {
			return ErrExpired // the message may have been a reset
		}
		for _, e := range events {
			if err := replayEvent(r, e, each); err != nil {
				return err
			}
		}
	}
	return nil
}

// replayEvent calls each with an event, if it is part of the replay.
func replayEvent(r *core.Replay, e *logv1.Event, each func(*logv1.Event) (bool, error)) error {
	part, err := r.Next(e)
	if err != nil || !part {
		return err
	}
	more, err := each(e)
	if err == nil && !more {
		err = errStopReplay
	}
	return err
}
