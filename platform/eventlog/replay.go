package eventlog

import (
	"context"
	"errors"
	"math"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrExpired means that the log does not hold all messages after a revision.
var ErrExpired = errors.New("the event log has expired messages after this revision")

// replayPause is the delay between reads of a replay at the end of the log.
const replayPause = 100 * time.Millisecond

// Replay calls each with the events of a storage resource after a revision, and with progress, in order. It ends when
// each returns false or an error, or ctx is done. Use it for events that a watch cache has evicted.
//
// Replay returns ErrExpired at a reset in the log, or if retention may have passed the reading position. The events
// before that are complete and have no gap. Replay calls each only for messages whose order is certain, so it lags a
// little behind the log. each must be fast.
func Replay(ctx context.Context, stream StreamReader, storedAs string, after int64,
	each func(*logv1.Event) (bool, error)) error {
	r := &replay{after: after, each: each}
	request := &logv1.ReadRequest{StorageResource: storedAs, After: after}
	for {
		if err := stream.Messages(ctx, request, r.handleChunk); err != nil {
			if errors.Is(err, errStopReplay) {
				err = nil
			}
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(replayPause):
		}
		request = &logv1.ReadRequest{StorageResource: storedAs, Sequence: r.through + 1}
	}
}

// errStopReplay ends a replay when each returns false.
var errStopReplay = errors.New("enough")

// replay is the progress of a Replay.
type replay struct {
	after     int64
	each      func(*logv1.Event) (bool, error)
	delivered bool
	created   int64
	through   uint64
}

// handleChunk calls each with the events of a chunk.
func (r *replay) handleChunk(c *logv1.Chunk) error {
	if r.created != 0 && (c.Created != r.created || c.Last < r.through) { // another stream, or its end is lost
		return ErrExpired
	}
	r.created, r.through = c.Created, c.Through
	for _, m := range c.Messages {
		e, err := decode(m.Encoding, m.Data)
		if err != nil { // it may have been a reset
			e = &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: math.MaxInt64}
		}
		switch {
		case e.Type == logv1.Type_TYPE_RESET && (r.delivered || e.Revision > r.after):
			return ErrExpired
		case e.Revision <= r.after:
			continue
		}
		r.delivered = true
		more, err := r.each(e)
		if err != nil {
			return err
		}
		if !more {
			return errStopReplay
		}
	}
	return nil
}
