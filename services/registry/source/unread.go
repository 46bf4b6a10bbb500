package source

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/rpc"
)

// mostUnread bounds the bytes of messages that the transport holds for all callers of a method. It also bounds the
// bytes of ReadLog messages that wait for the transport.
const mostUnread = 64 << 20

var errUnread = status.Error(codes.Unavailable, "too many messages wait for callers that read")

// weights counts bytes by peer. A peer has at most half of most, but may always have a single message.
type weights struct {
	most, all int
	by        map[string]int
}

func (w *weights) fits(peer string, bytes int) bool {
	by := w.by[peer]
	return by == 0 || w.all+bytes <= w.most && by+bytes <= w.most/2
}

// add adds bytes, which may be negative.
func (w *weights) add(peer string, bytes int) {
	if w.by == nil {
		w.by = map[string]int{}
	}
	w.all += bytes
	if w.by[peer] += bytes; w.by[peer] == 0 {
		delete(w.by, peer)
	}
}

// message is a message that waits for the transport, or that the transport holds.
type message struct {
	of    *callSlot
	bytes int
	// handed is closed when the transport may have it.
	handed chan struct{}
}

// send calls SendMsg once the unread messages leave space for the message.
func (slot *callSlot) send(ctx context.Context, m proto.Message, sendMsg func(any) error) error {
	message := &message{of: slot, bytes: proto.Size(m), handed: make(chan struct{})}
	if err := slot.limiter.hand(ctx, message); err != nil {
		return err
	}
	held := rpc.Hold(m, func() { slot.limiter.taken(message) })
	err := sendMsg(held)
	if err != nil {
		held.Release()
	}
	return err
}

// hand waits until the transport may have a message.
func (c *callLimiter) hand(ctx context.Context, m *message) error {
	c.mu.Lock()
	mayWait := c.unsent.fits(m.of.peer, m.bytes)
	c.messages = append(c.messages, m)
	c.unsent.add(m.of.peer, m.bytes)
	c.handOut()
	c.mu.Unlock()
	if mayWait {
		select {
		case <-m.handed:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := slices.Index(c.messages, m)
	if n < 0 {
		return nil
	}
	c.messages = slices.Delete(c.messages, n, n+1)
	c.unsent.add(m.of.peer, -m.bytes)
	c.handOut() // a smaller message may have waited behind it
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errUnread
}

// handOut gives waiting messages to the transport, in the order of their arrival. A peer without unread messages does
// not wait for others. The caller holds the lock.
func (c *callLimiter) handOut() {
	full, waits := false, map[string]bool{}
	c.messages = slices.DeleteFunc(c.messages, func(m *message) bool {
		peer := m.of.peer
		switch {
		case c.unread.by[peer] == 0:
		case full, waits[peer], !c.unread.fits(peer, m.bytes):
			waits[peer] = true
			full = full || c.unread.all+m.bytes > c.unread.most
			return false
		}
		c.unsent.add(peer, -m.bytes)
		c.unread.add(peer, m.bytes)
		if m.of.unread++; m.of.unread == 1 {
			m.of.taken = time.Now()
		}
		close(m.handed)
		return true
	})
}

// taken records that the transport has released a message.
func (c *callLimiter) taken(m *message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.of.unread--
	m.of.taken = time.Now()
	c.unread.add(m.of.peer, -m.bytes)
	c.handOut()
}
