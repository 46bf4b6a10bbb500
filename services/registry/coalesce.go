package registry

import (
	"context"
	"sync"
	"time"
)

// coalescer shares reads of etcd's revision. A caller gets the answer of a read that began after it asked, so the
// answer is linearizable; all who ask while one read is under way share the next.
type coalescer struct {
	read func(context.Context) (int64, error)

	mu   sync.Mutex
	busy bool
	next *flight
}

type flight struct {
	done     chan struct{}
	revision int64
	err      error
}

// readTimeout bounds one read; its callers may give up sooner.
const readTimeout = 5 * time.Second

func (c *coalescer) get(ctx context.Context) (int64, error) {
	c.mu.Lock()
	if c.next == nil {
		c.next = &flight{done: make(chan struct{})}
	}
	f := c.next
	if !c.busy {
		c.busy = true
		go c.run()
	}
	c.mu.Unlock()
	select {
	case <-f.done:
		return f.revision, f.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func (c *coalescer) run() {
	for {
		c.mu.Lock()
		f := c.next
		c.next = nil
		if f == nil {
			c.busy = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
		f.revision, f.err = c.read(ctx)
		cancel()
		close(f.done)
	}
}
