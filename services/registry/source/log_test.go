package source_test

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/source"
)

// endless is a log without end.
type endless struct{}

func (endless) Messages(ctx context.Context, _ *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	for ctx.Err() == nil {
		if err := each(&logv1.Chunk{}); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// caller takes some chunks of a call, and then stalls or leaves.
type caller struct {
	grpc.ServerStreamingServer[logv1.Chunk]
	ctx   context.Context
	takes int
	// stalled receives a message when the caller stalls. If it is nil, the caller leaves.
	stalled chan<- struct{}
	leave   context.CancelFunc
}

func (c *caller) Context() context.Context { return c.ctx }

func (c *caller) Send(*logv1.Chunk) error {
	if c.takes--; c.takes >= 0 {
		return nil
	}
	if c.stalled == nil {
		c.leave()
	} else {
		c.stalled <- struct{}{}
	}
	<-c.ctx.Done()
	return c.ctx.Err()
}

// Stalled calls of ReadLog make room for other calls: the call that has been stalled for the longest time ends (N3).
func TestStalledCallsMakeRoom(t *testing.T) {
	s := source.New(nil, nil, endless{})
	ctx, cancel := context.WithCancel(t.Context())
	const most, more = 128, 3
	ended, stalled := make(chan error, most+more), make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	for range most {
		all.Go(func() { ended <- s.ReadLog(&logv1.ReadRequest{}, &caller{ctx: ctx, takes: 1, stalled: stalled}) })
		<-stalled
	}
	for range more {
		mine, leave := context.WithCancel(t.Context())
		c := &caller{ctx: mine, takes: 1000, leave: leave}
		if err := s.ReadLog(&logv1.ReadRequest{}, c); status.Code(err) != codes.Canceled || c.takes >= 0 {
			t.Errorf("a caller that takes chunks has %d to take when it ends with %v", c.takes, err)
		}
		leave()
	}
	// The first caller ended a stalled call. The others found its room.
	if err := <-ended; status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a stalled call ended with %v", err)
	}
	if n := len(ended); n != 0 {
		t.Errorf("%d calls more were ended", n)
	}
}

// expired is a log that no longer holds the requested messages.
type expired struct{}

func (expired) Messages(context.Context, *logv1.ReadRequest, func(*logv1.Chunk) error) error {
	return eventlog.ErrExpired
}

// ReadLog answers OUT_OF_RANGE for an expired log, which the watch tier does not retry.
func TestAnExpiredLogHasItsCode(t *testing.T) {
	err := source.New(nil, nil, expired{}).ReadLog(&logv1.ReadRequest{}, &caller{ctx: t.Context()})
	if status.Code(err) != codes.OutOfRange {
		t.Error(err)
	}
}
