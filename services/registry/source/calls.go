package source

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/rpc"
)

const (
	// stalledAfter is how long a caller may take nothing of its call until that call is the first of its peer to end.
	stalledAfter = time.Second
	// stuckAfter is how long a caller may take nothing of its call until any other call may have its place. It is long,
	// because 32 healthy snapshots send 4 MB each at a time.
	stuckAfter = 10 * time.Second
	// lookAgain is how often calls that wait for a place look for a stuck call.
	lookAgain = time.Second
	// maxWaiting bounds the calls that wait for a place.
	maxWaiting = 256
)

var (
	errEnded = status.Error(codes.ResourceExhausted, "another caller needs the place of this call")
	errFull  = status.Error(codes.Unavailable, "too many calls wait")
)

// calls bounds the streaming calls of one method that run at a time, and the bytes of their messages. Further calls
// wait. The peer that runs the fewest calls has the next place, and its calls have places in the order in which they
// came. If a peer runs at least two calls more than the peer of a waiting call, its oldest call ends for that one.
type calls struct {
	most int

	mu sync.Mutex
	// all have a place, and waiting have none yet, each in the order in which they came.
	all, waiting []*call
	// ended counts the calls without a place that have not returned yet. There are most of them at most.
	ended int
	timer *time.Timer

	// messages wait for the transport, in the order in which they came. unsent are the bytes of these, and unread the
	// bytes that the transport holds. A message that may not wait ends its call.
	messages       []*message
	unsent, unread weights
}

// call is one of them. The lock of its calls guards what changes.
type call struct {
	of   *calls
	peer string
	end  context.CancelCauseFunc
	// begun is closed when the call has a place, or is refused.
	begun   chan struct{}
	refused bool
	// ended is true if the call has lost its place to another one.
	ended bool
	// unread counts the messages that the transport holds. If there are any, taken is when their number last fell, or
	// when the first of them came.
	unread int
	taken  time.Time
}

// run calls serve once there is a place. It returns when serve has returned or the call is ended: a SendMsg that stalls
// returns only after that. A call that is canceled keeps its place until serve returns.
func (c *calls) run(ctx context.Context, serve func(context.Context, *call) error) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	one := &call{of: c, peer: peerOf(ctx), end: end, begun: make(chan struct{})}
	if err := c.begin(ctx, one); err != nil {
		return rpc.ToStatus(err)
	}
	done := make(chan error, 1)
	go func() {
		err := serve(ctx, one)
		c.finish(one)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// peerOf returns the machine that a call comes from: its address, or the /64 of an IPv6 address. All calls by Unix
// sockets, and all of this process, are of one peer.
func peerOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	a, ok := p.Addr.(*net.TCPAddr)
	if !ok {
		return ""
	}
	ip := a.AddrPort().Addr().Unmap()
	if ip.Is6() {
		return netip.PrefixFrom(ip.WithZone(""), 64).Masked().String()
	}
	return ip.String()
}

// begin waits until the call has a place.
func (c *calls) begin(ctx context.Context, one *call) error {
	c.mu.Lock()
	c.waiting = append(c.waiting, one)
	c.admit()
	if len(c.waiting) > maxWaiting {
		c.refuse()
	}
	c.mu.Unlock()
	select {
	case <-one.begun:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case one.refused:
		return errFull
	case ctx.Err() == nil:
		return nil
	}
	if waits := slices.Index(c.waiting, one); waits >= 0 {
		c.waiting = slices.Delete(c.waiting, waits, waits+1)
	} else {
		c.leave(one)
	}
	return context.Cause(ctx)
}

// admit gives places to waiting calls. The lock is held.
func (c *calls) admit() {
	for len(c.waiting) > 0 {
		running := count(c.all)
		next := 0
		for i, w := range c.waiting {
			if running[w.peer] < running[c.waiting[next].peer] {
				next = i
			}
		}
		one := c.waiting[next]
		if len(c.all) >= c.most {
			victim := c.victim(running, one.peer)
			if victim == nil || c.ended >= c.most {
				break
			}
			c.all = slices.DeleteFunc(c.all, func(a *call) bool { return a == victim })
			c.ended++
			victim.ended = true
			victim.end(errEnded)
		}
		c.waiting = slices.Delete(c.waiting, next, next+1)
		c.all = append(c.all, one)
		close(one.begun)
	}
	if len(c.waiting) > 0 && c.timer == nil {
		c.timer = time.AfterFunc(lookAgain, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.timer = nil
			c.admit()
		})
	}
}

func count(all []*call) map[string]int {
	n := map[string]int{}
	for _, one := range all {
		n[one.peer]++
	}
	return n
}

// largest returns the peer with the most calls.
func largest(all []*call, counts map[string]int) (of string) {
	for n, one := range all {
		if n == 0 || counts[one.peer] > counts[of] {
			of = one.peer
		}
	}
	return of
}

// victim returns the call that ends for a waiting call of a peer, or nil. Peers whose numbers differ by one end no
// calls of each other, or they would do so for ever.
func (c *calls) victim(running map[string]int, waits string) *call {
	if from := largest(c.all, running); running[from] > running[waits]+1 {
		calls := slices.DeleteFunc(slices.Clone(c.all), func(a *call) bool { return a.peer != from })
		if stalled := stalledFor(calls, stalledAfter); stalled != nil {
			return stalled
		}
		return calls[0]
	}
	return stalledFor(c.all, stuckAfter)
}

// stalledFor returns the call that has been stalled for the longest time, if that is more than least.
func stalledFor(all []*call, least time.Duration) (longest *call) {
	for _, one := range all {
		if one.unread > 0 && time.Since(one.taken) >= least && (longest == nil || one.taken.Before(longest.taken)) {
			longest = one
		}
	}
	return longest
}

// refuse removes the last waiting call of the peer of which most calls wait. The lock is held.
func (c *calls) refuse() {
	of := largest(c.waiting, count(c.waiting))
	for i, one := range slices.Backward(c.waiting) {
		if one.peer == of {
			c.waiting = slices.Delete(c.waiting, i, i+1)
			one.refused = true
			close(one.begun)
			return
		}
	}
}

func (c *calls) finish(one *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave(one)
}

// leave gives back the place of a call. The lock is held.
func (c *calls) leave(one *call) {
	if one.ended {
		c.ended--
	} else {
		c.all = slices.DeleteFunc(c.all, func(a *call) bool { return a == one })
	}
	c.admit()
}
