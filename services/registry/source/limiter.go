package source

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
)

const (
	// stallTimeout is how long a call may receive no message before it is the first of its peer to be ended.
	stallTimeout = time.Second
	// stuckAfter is how long a call may receive no message before any other call may take its slot. It is long, because
	// 32 healthy snapshots send 4 MB each at a time.
	stuckAfter = 10 * time.Second
	// lookAgain is how often waiting calls check for a stuck call.
	lookAgain = time.Second
	// maxWaiting bounds the calls that wait for a slot.
	maxWaiting = 256
)

var (
	errEnded = status.Error(codes.ResourceExhausted, "another caller needs the slot of this call")
	errFull  = status.Error(codes.Unavailable, "too many calls wait")
)

// callLimiter bounds the concurrent streaming calls of a method, and the bytes of their messages. Further calls wait.
// The peer with the fewest running calls has the next slot, and its calls have slots in the order of their arrival. If
// a peer runs at least two calls more than the peer of a waiting call, its oldest call ends for that call.
type callLimiter struct {
	maxCalls int

	mu sync.Mutex
	// slots are the running calls and waiting the calls without a slot, both in the order of their arrival.
	slots, waiting []*callSlot
	// ended counts the calls that lost their slot and have not returned yet, at most maxCalls.
	ended int
	timer *time.Timer

	// messages wait for the transport, in the order of their arrival. unsent counts their bytes, and unread the bytes
	// that the transport holds. A message that may not wait ends its call.
	messages       []*message
	unsent, unread weights
}

// callSlot is a call of a callLimiter. The limiter's lock guards its fields. Its states:
//
//	waiting ── admit ──▶ running ── serve returns ──▶ released
//	waiting ── refuse, or ctx done ──▶ left
//	running ── victim for another peer ──▶ ended ── serve returns ──▶ released
type callSlot struct {
	limiter *callLimiter
	peer    string
	cancel  context.CancelCauseFunc
	// begun is closed when the call has a slot, or is refused.
	begun   chan struct{}
	refused bool
	// ended is true if the call lost its slot to another call.
	ended bool
	// unread counts the messages that the transport holds. If it is not 0, taken is when it last fell, or when it
	// became 1.
	unread int
	taken  time.Time
}

// run calls serve once the call has a slot. It returns when serve has returned or the call is ended, because a SendMsg
// that stalls returns only after that. A canceled call keeps its slot until serve returns.
func (c *callLimiter) run(ctx context.Context, serve func(context.Context, *callSlot) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	slot := &callSlot{limiter: c, peer: peerOf(ctx), cancel: cancel, begun: make(chan struct{})}
	if err := c.begin(ctx, slot); err != nil {
		return rpc.ToStatus(err)
	}
	done := make(chan error, 1)
	go func() {
		err := serve(ctx, slot)
		c.release(slot)
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

// peerOf returns the host of a call's client. All calls by Unix sockets, and all calls of this process, have the same
// peer.
func peerOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if _, ok := p.Addr.(*net.TCPAddr); !ok {
		return ""
	}
	return identity.Host(p.Addr.String())
}

// begin waits until the call has a slot.
func (c *callLimiter) begin(ctx context.Context, slot *callSlot) error {
	c.mu.Lock()
	c.waiting = append(c.waiting, slot)
	c.admit()
	if len(c.waiting) > maxWaiting {
		c.refuse()
	}
	c.mu.Unlock()
	select {
	case <-slot.begun:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case slot.refused:
		return errFull
	case ctx.Err() == nil:
		return nil
	}
	if waits := slices.Index(c.waiting, slot); waits >= 0 {
		c.waiting = slices.Delete(c.waiting, waits, waits+1)
	} else {
		c.leave(slot)
	}
	return context.Cause(ctx)
}

// admit assigns slots to waiting calls. The caller holds the lock.
func (c *callLimiter) admit() {
	for len(c.waiting) > 0 {
		running := count(c.slots)
		next := 0
		for i, w := range c.waiting {
			if running[w.peer] < running[c.waiting[next].peer] {
				next = i
			}
		}
		slot := c.waiting[next]
		if len(c.slots) >= c.maxCalls {
			victim := c.victim(running, slot.peer)
			if victim == nil || c.ended >= c.maxCalls {
				break
			}
			c.slots = slices.DeleteFunc(c.slots, func(a *callSlot) bool { return a == victim })
			c.ended++
			victim.ended = true
			victim.cancel(errEnded)
		}
		c.waiting = slices.Delete(c.waiting, next, next+1)
		c.slots = append(c.slots, slot)
		close(slot.begun)
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

func count(all []*callSlot) map[string]int {
	n := map[string]int{}
	for _, slot := range all {
		n[slot.peer]++
	}
	return n
}

// largest returns the peer with the most calls.
func largest(all []*callSlot, counts map[string]int) (of string) {
	for n, slot := range all {
		if n == 0 || counts[slot.peer] > counts[of] {
			of = slot.peer
		}
	}
	return of
}

// victim returns the call that ends for a waiting call of a peer, or nil. Peers whose numbers differ by 1 do not end
// each other's calls, because they would do so for ever.
func (c *callLimiter) victim(running map[string]int, waits string) *callSlot {
	if from := largest(c.slots, running); running[from] > running[waits]+1 {
		calls := slices.DeleteFunc(slices.Clone(c.slots), func(a *callSlot) bool { return a.peer != from })
		if stalled := stalledFor(calls, stallTimeout); stalled != nil {
			return stalled
		}
		return calls[0]
	}
	return stalledFor(c.slots, stuckAfter)
}

// stalledFor returns the call that has been stalled for the longest time, if that is at least least.
func stalledFor(all []*callSlot, least time.Duration) (longest *callSlot) {
	for _, slot := range all {
		if slot.unread > 0 && time.Since(slot.taken) >= least && (longest == nil || slot.taken.Before(longest.taken)) {
			longest = slot
		}
	}
	return longest
}

// refuse removes the last waiting call of the peer with the most waiting calls. The caller holds the lock.
func (c *callLimiter) refuse() {
	of := largest(c.waiting, count(c.waiting))
	for i, slot := range slices.Backward(c.waiting) {
		if slot.peer == of {
			c.waiting = slices.Delete(c.waiting, i, i+1)
			slot.refused = true
			close(slot.begun)
			return
		}
	}
}

func (c *callLimiter) release(slot *callSlot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave(slot)
}

// leave frees the slot of a call. The caller holds the lock.
func (c *callLimiter) leave(slot *callSlot) {
	if slot.ended {
		c.ended--
	} else {
		c.slots = slices.DeleteFunc(c.slots, func(a *callSlot) bool { return a == slot })
	}
	c.admit()
}
