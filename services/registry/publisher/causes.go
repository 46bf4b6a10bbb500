package publisher

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// maxCauses and causeAge bound what is kept of writes whose events have not come.
	maxCauses = 1000
	causeAge  = 10 * time.Second
	// maxToTell bounds what waits for NATS, and tellTimeout for how long.
	maxToTell   = 100
	tellTimeout = 100 * time.Millisecond
)

// causes are the traced writes that the publisher was told of and whose events have not come.
type causes struct {
	known atomic.Int64 // how many, for whoever has nothing to ask

	once   sync.Once
	toTell chan *telling

	mu sync.Mutex
	of map[write]cause
}

// write is one, by what it is made over.
type write struct {
	key      string
	expected int64
}

type cause struct {
	trace string
	told  time.Time
}

// Tell takes note of a write of this registry that is traced, before it is made: for itself, or with whoever publishes.
// It takes tellTimeout at most, whatever NATS does.
func (p *Publisher) Tell(c *logv1.TraceContext) {
	if p.publishes.Load() {
		p.causes.add(c)
		return
	}
	t := &telling{c, make(chan struct{})}
	timeout := time.NewTimer(tellTimeout)
	defer timeout.Stop()
	select {
	case p.causes.others() <- t:
	default: // NATS stalls
		return
	}
	select {
	case <-t.told:
	case <-timeout.C:
	}
}

// telling is a cause that somebody else is to be told of. told is closed once that is done or given up.
type telling struct {
	*logv1.TraceContext
	told chan struct{}
}

// tellOthers tells whoever publishes, until ctx is done.
func (p *Publisher) tellOthers(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-p.causes.others():
			one, cancel := context.WithTimeout(ctx, tellTimeout)
			if err := eventlog.PublishTraceContext(one, p.NATS, t.TraceContext); err != nil {
				slog.Debug("The publisher is not told of a traced write", "error", err)
			}
			cancel()
			close(t.told)
		}
	}
}

// others are those that somebody else publishes, and is yet to be told of.
func (c *causes) others() chan *telling {
	c.once.Do(func() { c.toTell = make(chan *telling, maxToTell) })
	return c.toTell
}

func (c *causes) add(told *logv1.TraceContext) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.of) >= maxCauses {
		for w, cause := range c.of {
			if now.Sub(cause.told) > causeAge {
				delete(c.of, w)
			}
		}
	}
	if c.of == nil {
		c.of = map[write]cause{}
	}
	if len(c.of) < maxCauses {
		c.of[write{told.Key, told.ExpectedRevision}] = cause{told.Traceparent, now}
	}
	c.known.Store(int64(len(c.of)))
}

// take is the trace that an event belongs to, or empty.
func (c *causes) take(e *clientv3.Event) string {
	if c.known.Load() == 0 {
		return ""
	}
	w := write{key: string(e.Kv.Key)}
	if e.PrevKv != nil {
		w.expected = e.PrevKv.ModRevision
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.of[w]
	delete(c.of, w)
	c.known.Store(int64(len(c.of)))
	if time.Since(found.told) > causeAge { // a write that failed; this is another over the same
		return ""
	}
	return found.trace
}
