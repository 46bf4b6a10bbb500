package source

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/rpc"
)

// stalledAfter is how long a caller may take nothing of its call before another call may have its place.
const stalledAfter = time.Second

var errStalled = status.Error(codes.ResourceExhausted, "the caller stalls, and another call needs the room")

// calls bounds the streaming calls of one method that run at a time, and so the memory that they hold. Further calls
// wait. A call whose caller stalls ends when another waits.
type calls struct {
	most int

	mu  sync.Mutex
	all map[*call]struct{}
	// freed is closed when a call ends, if another waits.
	freed chan struct{}
}

// call is one of them. sending is when it began to send a message that its caller has not taken yet, or zero. The lock
// of its calls guards it.
type call struct {
	of      *calls
	sending time.Time
	end     context.CancelCauseFunc
}

// run calls serve once there is room. It returns when serve has returned or the call is ended: a Send that stalls
// returns only after that.
func (c *calls) run(ctx context.Context, serve func(context.Context, *call) error) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	one := &call{of: c, end: end}
	if err := c.begin(ctx, one); err != nil {
		return rpc.ToStatus(err)
	}
	defer c.finish(one)
	done := make(chan error, 1)
	go func() { done <- serve(ctx, one) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin adds a call when there is room. If there is none, begin ends the call that has been stalled for the longest
// time.
func (c *calls) begin(ctx context.Context, one *call) error {
	again := time.NewTimer(stalledAfter)
	defer again.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.all) >= c.most {
		if stalled := c.stalled(); stalled != nil {
			delete(c.all, stalled)
			stalled.end(errStalled)
			break
		}
		if c.freed == nil {
			c.freed = make(chan struct{})
		}
		freed := c.freed
		c.mu.Unlock()
		again.Reset(stalledAfter / 10)
		select {
		case <-freed:
		case <-again.C:
		case <-ctx.Done():
		}
		c.mu.Lock()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if c.all == nil {
		c.all = map[*call]struct{}{}
	}
	c.all[one] = struct{}{}
	return nil
}

// stalled returns the call that has been stalled for the longest time, or nil. The lock is held.
func (c *calls) stalled() (longest *call) {
	for one := range c.all {
		if !one.sending.IsZero() && time.Since(one.sending) > stalledAfter &&
			(longest == nil || one.sending.Before(longest.sending)) {
			longest = one
		}
	}
	return longest
}

func (c *calls) finish(one *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, one)
	if c.freed != nil {
		close(c.freed)
		c.freed = nil
	}
}

// send calls f, which sends one message.
func (one *call) send(f func() error) error {
	one.set(time.Now())
	defer one.set(time.Time{})
	return f()
}

func (one *call) set(sending time.Time) {
	one.of.mu.Lock()
	defer one.of.mu.Unlock()
	one.sending = sending
}
