package eventlog

import (
	"context"
	"errors"
	"math"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrExpired says that the log does not hold everything after a revision any more.
var ErrExpired = errors.New("the event log does not go back so far")

// replayPause is how long a replay that has come to the log's end waits until it reads on.
const replayPause = 100 * time.Millisecond

// Replay calls each with the events of a stored resource after a revision, and with progress, in order, until each
// answers false or an error, or ctx is done. It is for those who need more than a reader keeps. ErrExpired comes
// where the log has a reset, or where its retention may have overtaken the reading: what each was given before is sound
// and has no gap. each is called for as many messages at a time as are known to follow each other, so it lags a little
// behind the log; it must be quick.
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

// errStopReplay ends a replay whose reader has enough.
var errStopReplay = errors.New("enough")

// replay is how far a replay has come.
type replay struct {
	after     int64
	each      func(*logv1.Event) (bool, error)
	delivered bool
	created   int64
	through   uint64
}

// handleChunk calls each with a chunk's events.
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
