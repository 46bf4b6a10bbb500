package source

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/guard"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// maxLogReads bounds how many calls of ReadLog run at a time. Each holds about two chunks of the log.
const maxLogReads = 128

var (
	errTooManyLogReads = status.Error(codes.ResourceExhausted, "too many calls read the event log")
	errLogReadStalled  = status.Error(codes.ResourceExhausted, "the caller stalls, and another call needs the room")
)

// logReads are the calls of ReadLog that run.
type logReads struct {
	mu  sync.Mutex
	all map[*logRead]struct{}
}

// logRead is one call. sending is when it began to send a chunk that its caller has not taken yet, or zero. The lock of
// logReads guards it.
type logRead struct {
	sending time.Time
	end     context.CancelCauseFunc
}

// begin adds a call. If there are too many, begin ends the one whose caller has taken nothing for the longest time.
func (l *logReads) begin(r *logRead) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) >= maxLogReads {
		var stalled *logRead
		for o := range l.all {
			if !o.sending.IsZero() && (stalled == nil || o.sending.Before(stalled.sending)) {
				stalled = o
			}
		}
		if stalled == nil {
			return errTooManyLogReads
		}
		delete(l.all, stalled)
		stalled.end(errLogReadStalled)
	}
	if l.all == nil {
		l.all = map[*logRead]struct{}{}
	}
	l.all[r] = struct{}{}
	return nil
}

func (l *logReads) finish(r *logRead) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, r)
}

func (l *logReads) setSending(r *logRead, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.sending = at
}

// ReadLog sends messages that the event log's stream holds. The call ends early if its caller stalls and another call
// needs the room.
func (s *Source) ReadLog(r *logv1.ReadRequest, stream grpc.ServerStreamingServer[logv1.Chunk]) error {
	ctx, end := context.WithCancelCause(stream.Context())
	defer end(nil)
	read := &logRead{end: end}
	if err := s.logReads.begin(read); err != nil {
		return err
	}
	defer s.logReads.finish(read)
	done := make(chan error, 1)
	go func() { // a stalled Send ends when the call returns
		done <- s.sendLog(ctx, r, func(c *logv1.Chunk) error {
			s.logReads.setSending(read, time.Now())
			defer s.logReads.setSending(read, time.Time{})
			return stream.Send(c)
		})
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if errors.Is(err, eventlog.ErrExpired) {
		return status.Error(codes.OutOfRange, err.Error())
	}
	return rpc.ToStatus(err)
}

func (s *Source) sendLog(ctx context.Context, r *logv1.ReadRequest, send func(*logv1.Chunk) error) (err error) {
	defer guard.Error("reading the event log", &err)
	return s.stored.Messages(ctx, r, send)
}
